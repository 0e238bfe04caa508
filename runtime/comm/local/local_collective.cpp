#include "runtime/comm/local/local_collective.h"

#include <algorithm>
#include <condition_variable>
#include <iterator>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "model/base/error.h"

namespace slidedp {
namespace {

enum class Operation : uint8_t { all_gather, reduce_scatter, broadcast };

// What all ranks of one call must agree on.
struct Signature {
  Operation operation{};
  int64_t size = 0;  // bytes; reduce-scatter: elements of one shard
  DType type{};
  int root = 0;
  bool operator==(const Signature&) const = default;

  std::string text() const {
    switch (operation) {
      case Operation::all_gather:
        return "all_gather of " + std::to_string(size) + " bytes a rank";
      case Operation::reduce_scatter:
        return "reduce_scatter of " + std::to_string(size) + " " + std::string(name(type)) + " elements a rank";
      case Operation::broadcast:
        return "broadcast of " + std::to_string(size) + " bytes from rank " + std::to_string(root);
    }
    return {};
  }
};

}  // namespace

struct LocalCollective::Call {
  Signature signature;
  const void* input = nullptr;
  void* output = nullptr;
};

// The calls that ranks have issued and not all completed, by their number.
class LocalCollective::Meetings {
 public:
  explicit Meetings(int ranks) : ranks_(ranks), next_(ranks, 0) {}

  // Issuing thread. The number of this rank's call, or -1 after an abort.
  int64_t announce(int rank, const Call& call);
  // The stream's worker. `ready`: where the rank's input is. Returns true when all ranks have arrived: then every rank
  // must run() and depart(). Returns false when the meeting will not happen. Throws Error when the ranks' calls differ.
  bool arrive(int64_t number, int rank, std::shared_ptr<void> ready);
  void run(int64_t number, int rank, LocalOperations& operations);
  void depart(int64_t number);
  // After depart(): nothing that the stream does from here on disturbs the others.
  void follow_all(int64_t number, LocalOperations& operations);
  // The stream's worker, after the call, also when that was skipped: a rank that has not arrived never will.
  void close(int64_t number, int rank);
  void abort();

 private:
  enum class State : uint8_t { gathering, running, cancelled };
  struct Meeting {
    explicit Meeting(int ranks) : calls(ranks), arrived(ranks, false), ready(ranks), read(ranks) {}
    std::vector<Call> calls;
    std::vector<bool> arrived;
    std::vector<std::shared_ptr<void>> ready, read;  // by rank: its input is there; it has read the others'
    State state = State::gathering;
    std::string mismatch;
    int first_rank = -1;
    int announced = 0, arrivals = 0, departures = 0, closed = 0;
  };
  void cancel(Meeting& meeting);
  Meeting& meeting(int64_t number);
  void move(const Meeting& meeting, int rank, LocalOperations& operations) const;

  const int ranks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool aborted_ = false;
  std::vector<int64_t> next_;            // by rank
  std::map<int64_t, Meeting> meetings_;  // references stay valid until the last rank's close()
  // Points of closed meetings. close() runs where a device forbids calls, such as giving an event back.
  std::vector<std::shared_ptr<void>> spent_;
};

int64_t LocalCollective::Meetings::announce(int rank, const Call& call) {
  std::vector<std::shared_ptr<void>> spent;  // goes after the lock
  std::lock_guard lock(mutex_);
  spent.swap(spent_);
  if (aborted_) return -1;
  const int64_t number = next_[rank]++;
  Meeting& meeting = meetings_.try_emplace(number, ranks_).first->second;
  meeting.calls[rank] = call;
  if (meeting.announced++ == 0) meeting.first_rank = rank;
  const Signature& first = meeting.calls[meeting.first_rank].signature;
  if (!(call.signature == first) && meeting.mismatch.empty()) {
    meeting.mismatch = "Ranks issued different collectives as their call " + std::to_string(number) + ": rank " +
                       std::to_string(meeting.first_rank) + " " + first.text() + ", rank " + std::to_string(rank) +
                       " " + call.signature.text() + ".";
    cancel(meeting);
  }
  return number;
}

bool LocalCollective::Meetings::arrive(int64_t number, int rank, std::shared_ptr<void> ready) {
  std::unique_lock lock(mutex_);
  Meeting& meeting = meetings_.at(number);
  meeting.arrived[rank] = true;
  meeting.ready[rank] = std::move(ready);
  if (++meeting.arrivals == ranks_ && meeting.state == State::gathering) {
    meeting.state = State::running;
    changed_.notify_all();
  }
  changed_.wait(lock, [&] { return meeting.state != State::gathering; });
  if (!meeting.mismatch.empty()) throw Error(meeting.mismatch);
  return meeting.state == State::running;
}

// A meeting lives until every rank has closed it; while it runs nobody changes the calls and the ready points.
LocalCollective::Meetings::Meeting& LocalCollective::Meetings::meeting(int64_t number) {
  std::lock_guard lock(mutex_);
  return meetings_.at(number);
}

void LocalCollective::Meetings::run(int64_t number, int rank, LocalOperations& operations) {
  Meeting& meeting = this->meeting(number);
  for (int other = 0; other < ranks_; ++other) {
    if (other != rank) operations.follow(meeting.ready[other]);
  }
  if (meeting.calls[rank].signature.size > 0) move(meeting, rank, operations);
  meeting.read[rank] = operations.mark();  // depart() tells the others
}

void LocalCollective::Meetings::move(const Meeting& meeting, int rank, LocalOperations& operations) const {
  const auto& calls = meeting.calls;
  const auto& [signature, input, output] = calls[rank];
  switch (signature.operation) {
    case Operation::all_gather:
      for (int other = 0; other < ranks_; ++other) {
        char* part = static_cast<char*>(output) + other * signature.size;
        if (part != calls[other].input) operations.copy(part, calls[other].input, signature.size);
      }
      break;
    case Operation::reduce_scatter: {
      const int64_t begin = rank * signature.size * size_of(signature.type);
      std::vector<const void*> parts;
      for (const Call& call : calls) parts.push_back(static_cast<const char*>(call.input) + begin);
      operations.sum(parts, output, signature.size, signature.type);
      break;
    }
    case Operation::broadcast:
      if (rank != signature.root) operations.copy(output, calls[signature.root].input, signature.size);
      break;
  }
}

void LocalCollective::Meetings::depart(int64_t number) {
  std::unique_lock lock(mutex_);
  Meeting& meeting = meetings_.at(number);
  if (++meeting.departures == ranks_) changed_.notify_all();
  // Not cut short by an abort: the others read this rank's input now and are done in finite time.
  changed_.wait(lock, [&] { return meeting.departures == ranks_; });
}

void LocalCollective::Meetings::follow_all(int64_t number, LocalOperations& operations) {
  for (const auto& point : meeting(number).read) operations.follow(point);
}

void LocalCollective::Meetings::close(int64_t number, int rank) {
  std::lock_guard lock(mutex_);
  Meeting& meeting = meetings_.at(number);
  if (!meeting.arrived[rank]) cancel(meeting);
  if (++meeting.closed < ranks_) return;
  for (auto* points : {&meeting.ready, &meeting.read}) {
    std::move(points->begin(), points->end(), std::back_inserter(spent_));
  }
  meetings_.erase(number);
}

void LocalCollective::Meetings::abort() {
  std::lock_guard lock(mutex_);
  aborted_ = true;
  for (auto& [number, meeting] : meetings_) cancel(meeting);
}

void LocalCollective::Meetings::cancel(Meeting& meeting) {
  if (meeting.state != State::gathering) return;
  meeting.state = State::cancelled;
  changed_.notify_all();
}

// The others wait for this rank even if its own part throws.
struct LocalCollective::Departure {
  Meetings& meetings;
  int64_t number;
  ~Departure() { meetings.depart(number); }
};

LocalCollective::LocalCollective(std::vector<Device*> devices, std::shared_ptr<LocalOperations> operations)
    : devices_(std::move(devices)),
      operations_(std::move(operations)),
      meetings_(std::make_shared<Meetings>(static_cast<int>(devices_.size()))) {}

LocalCollective::LocalCollective(std::vector<Device*> devices)
    : LocalCollective(std::move(devices), make_host_operations()) {}

LocalCollective::~LocalCollective() { meetings_->abort(); }

int LocalCollective::ranks() const { return static_cast<int>(devices_.size()); }

void LocalCollective::issue(int rank, Stream& stream, const Call& call) {
  if (rank < 0 || rank >= ranks()) throw std::logic_error("no rank " + std::to_string(rank));
  if (call.signature.size < 0) throw std::logic_error("negative size of a collective");
  Device* device = devices_[rank];
  const int64_t number = meetings_->announce(rank, call);
  if (number < 0) {
    device->abort();
    return;
  }
  device->launch(stream, [meetings = meetings_, operations = operations_, device, number, rank] {
    if (!meetings->arrive(number, rank, operations->mark())) {
      device->abort();
      return;
    }
    {
      const Departure departure{*meetings, number};
      meetings->run(number, rank, *operations);
    }
    meetings->follow_all(number, *operations);
  });
  device->notify(stream, [meetings = meetings_, number, rank] { meetings->close(number, rank); });
}

void LocalCollective::all_gather(int rank, Stream& stream, const void* shard, void* full, int64_t shard_bytes) {
  issue(rank, stream, {{Operation::all_gather, shard_bytes, DType::bf16, 0}, shard, full});
}

void LocalCollective::reduce_scatter(int rank, Stream& stream, const void* full, void* shard, int64_t shard_elements,
                                     DType type) {
  issue(rank, stream, {{Operation::reduce_scatter, shard_elements, type, 0}, full, shard});
}

void LocalCollective::broadcast(int rank, Stream& stream, void* data, int64_t bytes, int root) {
  if (root < 0 || root >= ranks()) throw std::logic_error("no root rank " + std::to_string(root));
  issue(rank, stream, {{Operation::broadcast, bytes, DType::bf16, root}, data, data});
}

void LocalCollective::abort() { meetings_->abort(); }

}  // namespace slidedp
