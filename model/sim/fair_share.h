// Max-min fair sharing of resources between running tasks.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace slidedp {

using ResourceId = int;

// While tasks run that would take so much of another resource if only they ran, work takes 1 + per_unit * so much times
// as long.
struct Beside {
  ResourceId other;
  double per_unit;
};

// What makes the users of a resource slow: work takes the product of the factors of all in `beside`, over `headroom`,
// but never less than alone, and the capacity is less by the same factor. Headroom above 1: that much could be lost
// before it shows. Each user's work, not all together, also takes 1 + per_unit_of_own * (what all want at full speed)
// times as long.
struct Contention {
  double headroom = 1;
  double per_unit_of_own = 0;
  std::vector<Beside> beside = {};
  bool any() const { return per_unit_of_own > 0 || !beside.empty(); }
};

// A shared thing with a capacity, in units per second.
struct Resource {
  std::string name;
  double capacity = 0;
  Contention contention = {};
};

// What one running task takes of one resource at full speed, in the resource's units per second.
struct Load {
  ResourceId resource;
  double rate;
};

// Speeds of running tasks, each in (0, 1] of what the task does alone, by progressive filling: all speeds rise together
// until a resource is full, the tasks that use it stay there, the others go on rising until each is stopped by a full
// resource or reaches its highest speed: 1, or what contention leaves. So tasks that share a bottleneck slow down by
// the same factor, whatever they demand of it.
//
// Keeps scratch memory between calls; not thread-safe.
class FairShare {
 public:
  explicit FairShare(std::span<const Resource> resources);
  // tasks[i] are the loads of the i-th running task; its speed goes to speeds[i].
  void share(std::span<const std::span<const Load>> tasks, std::span<double> speeds);

 private:
  struct State {
    double fixed = 0;   // taken by tasks whose speed is final
    double wanted = 0;  // full-speed demand of all
    double rising = 0;  // of the others
    int users = 0;      // how many others
    double left = 1;    // of the capacity, by contention
    double limit = 1;   // of each user's speed, by contention
  };
  void contend();
  void settle(std::span<const Load> loads, double speed);

  std::vector<Resource> resources_;
  std::vector<State> states_;
  std::vector<int> touched_;   // resources that some task uses
  std::vector<int> rising_;    // tasks whose speed is not final
  std::vector<double> limit_;  // their highest speeds
};

}  // namespace slidedp
