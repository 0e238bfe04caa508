#include "tests/support/disturbance.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <utility>

#include "model/base/error.h"

namespace slidedp::testing {
namespace {

class DisturbedDevice final : public Device {
 public:
  DisturbedDevice(std::unique_ptr<Device> real, Disturbance& disturbance)
      : real_(std::move(real)), disturbance_(disturbance) {}
  int rank() const override { return real_->rank(); }
  DeviceMemory allocate(int64_t bytes, const std::string& what) override { return real_->allocate(bytes, what); }
  MemoryUse memory() const override { return real_->memory(); }
  std::unique_ptr<Stream> create_stream(const std::string& name) override { return real_->create_stream(name); }
  std::unique_ptr<Event> create_event() override { return real_->create_event(); }
  void record(Stream& stream, Event& event) override { real_->record(stream, event); }
  void wait(Stream& stream, Event& event) override { real_->wait(stream, event); }
  double timestamp(const Event& event) const override { return real_->timestamp(event); }
  void copy_to_device(Stream& stream, void* device, const void* host, int64_t bytes) override {
    disturb(stream, TaskKind::h2d);
    real_->copy_to_device(stream, device, host, bytes);
  }
  void copy_rows_to_device(Stream& stream, void* device, const void* host_base, const int32_t* rows, int64_t count,
                           int64_t row_bytes) override {
    disturb(stream, TaskKind::h2d);
    real_->copy_rows_to_device(stream, device, host_base, rows, count, row_bytes);
  }
  void copy_to_host(Stream& stream, void* host, const void* device, int64_t bytes) override {
    disturb(stream, TaskKind::d2h);
    real_->copy_to_host(stream, host, device, bytes);
  }
  void launch(Stream& stream, std::function<void()> work) override { real_->launch(stream, std::move(work)); }
  void notify(Stream& stream, std::function<void()> done) override { real_->notify(stream, std::move(done)); }
  void synchronize(Stream& stream) override { real_->synchronize(stream); }
  void register_host(void* data, int64_t bytes) override {
    if (disturbance_.refuse_registration) fail("The system refuses to pin memory.");
    real_->register_host(data, bytes);
  }
  void unregister_host(void* data) override { real_->unregister_host(data); }
  void set_error_handler(std::function<void(std::exception_ptr)> handler) override {
    real_->set_error_handler(std::move(handler));
  }
  void abort() override { real_->abort(); }

 private:
  void disturb(Stream& stream, TaskKind kind) {
    real_->launch(stream, [this, kind] { disturbance_.pass(kind, rank()); });
  }
  void release(void*, int64_t) override { throw std::logic_error("memory belongs to the real device"); }

  const std::unique_ptr<Device> real_;
  Disturbance& disturbance_;
};

class DisturbedCollective final : public Collective {
 public:
  DisturbedCollective(std::unique_ptr<Collective> real, const Backend& backend, Disturbance& disturbance)
      : real_(std::move(real)), devices_(backend.devices), disturbance_(disturbance) {}
  int ranks() const override { return real_->ranks(); }
  void all_gather(int rank, Stream& stream, const void* shard, void* full, int64_t bytes) override {
    disturb(rank, stream, TaskKind::all_gather);
    real_->all_gather(rank, stream, shard, full, bytes);
  }
  void reduce_scatter(int rank, Stream& stream, const void* full, void* shard, int64_t elements, DType type) override {
    disturb(rank, stream, TaskKind::reduce_scatter);
    real_->reduce_scatter(rank, stream, full, shard, elements, type);
  }
  void broadcast(int rank, Stream& stream, void* data, int64_t bytes, int root) override {
    disturb(rank, stream, TaskKind::broadcast);
    real_->broadcast(rank, stream, data, bytes, root);
  }
  void abort() override { real_->abort(); }

 private:
  void disturb(int rank, Stream& stream, TaskKind kind) {
    devices_[static_cast<size_t>(rank)]->launch(stream, [this, kind, rank] { disturbance_.pass(kind, rank); });
  }
  const std::unique_ptr<Collective> real_;
  const std::vector<std::unique_ptr<Device>>& devices_;
  Disturbance& disturbance_;
};

class DisturbedCompute final : public Compute {
 public:
  DisturbedCompute(std::unique_ptr<Compute> real, int rank, Disturbance& disturbance)
      : real_(std::move(real)), rank_(rank), disturbance_(disturbance) {}
  void embedding_forward(const void* weights, const MicroBatch& batch, void* out) override {
    disturbance_.pass(TaskKind::fwd, rank_);
    real_->embedding_forward(weights, batch, out);
  }
  void embedding_backward(const MicroBatch& batch, const void* in, void* gradients, int64_t rows, bool first) override {
    disturbance_.pass(TaskKind::bwd, rank_);
    real_->embedding_backward(batch, in, gradients, rows, first);
  }
  void block_forward(LayerBlock block, int layer, const void* w, const MicroBatch& b, const void* in, void* saved,
                     void* out) override {
    const bool recompute = block == LayerBlock::mlp && out == nullptr;
    disturbance_.pass(recompute ? TaskKind::recompute : TaskKind::fwd, rank_);
    real_->block_forward(block, layer, w, b, in, saved, out);
  }
  void block_backward(LayerBlock block, int layer, const void* w, const MicroBatch& b, const void* in, void* saved,
                      void* hidden_gradient, void* gradients, bool first) override {
    disturbance_.pass(TaskKind::bwd, rank_);
    real_->block_backward(block, layer, w, b, in, saved, hidden_gradient, gradients, first);
  }
  void head(const void* w, const void* vocabulary, const MicroBatch& b, const void* in, void* hidden_gradient,
            void* gradients, void* vocabulary_gradients, bool first, double* loss) override {
    disturbance_.pass(TaskKind::head, rank_);
    real_->head(w, vocabulary, b, in, hidden_gradient, gradients, vocabulary_gradients, first, loss);
  }
  void cast(const void* from, DType from_type, void* to, DType to_type, int64_t elements) override {
    disturbance_.pass(TaskKind::cast, rank_);
    real_->cast(from, from_type, to, to_type, elements);
  }

 private:
  const std::unique_ptr<Compute> real_;
  const int rank_;
  Disturbance& disturbance_;
};

}  // namespace

void Disturbance::wrap(Backend& backend) {
  for (size_t rank = 0; rank < backend.compute.size(); ++rank) {
    auto& compute = backend.compute[rank];
    compute = std::make_unique<DisturbedCompute>(std::move(compute), static_cast<int>(rank), *this);
  }
  // The real collective keeps driving the real devices.
  for (auto& device : backend.devices) device = std::make_unique<DisturbedDevice>(std::move(device), *this);
  backend.collective = std::make_unique<DisturbedCollective>(std::move(backend.collective), backend, *this);
}

void Disturbance::pass(TaskKind kind, int rank) {
  const int64_t operation = operations_.fetch_add(1, std::memory_order_relaxed);
  std::minstd_rand random(seed_ * 2654435761U + static_cast<uint32_t>(operation) * 40503U + 1U);
  random.discard(2);
  if (const auto draw = random() % 16; draw == 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
  } else if (draw < 4) {
    std::this_thread::yield();
  }
  const std::lock_guard lock(mutex_);
  for (Fault& fault : faults_) {
    const bool here = fault.kind == kind && (fault.rank == Fault::kAnyRank || fault.rank == rank);
    if (!here || --fault.call != 0) continue;
    thrown_.store(true, std::memory_order_relaxed);
    throw std::runtime_error(message(kind));
  }
}

Watchdog::Watchdog(std::string what, std::chrono::seconds limit)
    : thread_([this, what = std::move(what), limit] {
        std::unique_lock lock(mutex_);
        if (changed_.wait_for(lock, limit, [this] { return done_; })) return;
        std::fprintf(stderr, "hangs: %s\n", what.c_str());
        std::abort();
      }) {}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    done_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

}  // namespace slidedp::testing
