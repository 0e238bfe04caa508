// Max-min fair sharing of resources between running tasks.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace slidedp {

using ResourceId = int;

// While tasks run that want all of another resource, a share of the capacity is lost; while they want less of it, so
// much less. What they want is what they would take at full speed.
struct Loss {
  ResourceId beside;
  double share;
};

// A shared thing with a capacity, in units per second.
struct Resource {
  std::string name;
  double capacity = 0;
  std::vector<Loss> losses = {};  // the shares add up to less than 1
  double least_capacity() const;  // beside all that it loses to
};

// What one running task takes of one resource at full speed, in the resource's units per second.
struct Load {
  ResourceId resource;
  double rate;
};

// Speeds of running tasks, each in (0, 1] of what the task does alone, by progressive filling: all speeds rise
// together, each in proportion to the task's weight, until a resource is full, the tasks that use it stay there, the
// others go on rising until each is stopped by a full resource or reaches 1. So tasks of one weight that share a
// bottleneck slow down by the same factor, whatever they demand of it. Capacities are what the running tasks leave of
// them (Loss).
//
// Keeps scratch memory between calls; not thread-safe.
class FairShare {
 public:
  explicit FairShare(std::span<const Resource> resources);
  // tasks[i] are the loads of the i-th running task; its speed goes to speeds[i]. No weights: all alike.
  void share(std::span<const std::span<const Load>> tasks, std::span<double> speeds,
             std::span<const double> weights = {});

 private:
  struct State {
    double fixed = 0;   // taken by tasks whose speed is final
    double wanted = 0;  // full-speed demand of all
    double rising = 0;  // of the others, at the speeds of level 1
    int users = 0;      // how many others
  };
  struct Effect {
    ResourceId on, by;
    double most;  // lost of `on`'s capacity
  };
  void reduce_capacities();
  void settle(std::span<const Load> loads, double weight, double speed);

  std::vector<double> full_;  // capacities without losses
  std::vector<double> capacities_;
  std::vector<Effect> effects_;
  std::vector<State> states_;
  std::vector<int> touched_;  // resources that some task uses
  std::vector<int> rising_;   // tasks whose speed is not final
};

}  // namespace slidedp
