// A failure in any lane or in the pool ends the run with one error, and nobody hangs (ctest's time limit would tell).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <thread>

#include "model/base/error.h"
#include "runtime/exec/executor.h"
#include "tests/support/tiny_run.h"

namespace slidedp::testing {
namespace {

using ::testing::HasSubstr;

// Passes everything on; a call's work on the stream throws at the n-th call.
class FailingWork final : public Collective {
 public:
  FailingWork(std::unique_ptr<Collective> real, Device& device, int calls)
      : real_(std::move(real)), device_(device), left_(calls) {}
  int ranks() const override { return real_->ranks(); }
  void all_gather(int rank, Stream& stream, const void* shard, void* full, int64_t bytes) override {
    if (rank == 0 && --left_ == 0) device_.launch(stream, [] { throw std::runtime_error("injected fault"); });
    real_->all_gather(rank, stream, shard, full, bytes);
  }
  void reduce_scatter(int rank, Stream& stream, const void* full, void* shard, int64_t elements, DType type) override {
    real_->reduce_scatter(rank, stream, full, shard, elements, type);
  }
  void broadcast(int rank, Stream& stream, void* data, int64_t bytes, int root) override {
    real_->broadcast(rank, stream, data, bytes, root);
  }
  void abort() override { real_->abort(); }

 private:
  std::unique_ptr<Collective> real_;
  Device& device_;
  int left_;  // used by rank 0's issuing thread only
};

// Passes everything on; throws at the n-th call of one function, or plants a NaN in a gradient.
class FaultyCompute final : public Compute {
 public:
  enum class Where {
    none,
    embedding_forward,
    embedding_backward,
    layer_forward,
    layer_backward,
    head,
    cast,
    nan,
    lookup_nan
  };
  FaultyCompute(std::unique_ptr<Compute> real, Where where, int calls)
      : real_(std::move(real)), where_(where), left_(calls) {}

  void embedding_forward(const void* weights, const MicroBatch& batch, void* out) override {
    trip(Where::embedding_forward);
    real_->embedding_forward(weights, batch, out);
  }
  void embedding_backward(const MicroBatch& batch, const void* in, void* gradients, int64_t rows, bool first) override {
    trip(Where::embedding_backward);
    real_->embedding_backward(batch, in, gradients, rows, first);
    if (where_ == Where::lookup_nan && --left_ == 0) {
      static_cast<float*>(gradients)[5] = std::numeric_limits<float>::quiet_NaN();
    }
  }
  void block_forward(LayerBlock block, int layer, const void* w, const MicroBatch& b, const void* in, void* saved,
                     void* out) override {
    trip(Where::layer_forward);
    real_->block_forward(block, layer, w, b, in, saved, out);
  }
  void block_backward(LayerBlock block, int layer, const void* w, const MicroBatch& b, const void* in, void* saved,
                      void* hidden_gradient, void* gradients, bool first) override {
    trip(Where::layer_backward);
    real_->block_backward(block, layer, w, b, in, saved, hidden_gradient, gradients, first);
    // In the input norm.
    if (where_ == Where::nan && layer == 1 && block == LayerBlock::attention && --left_ == 0) {
      static_cast<float*>(gradients)[5] = std::numeric_limits<float>::quiet_NaN();
    }
  }
  void head(const void* w, const void* vocabulary, const MicroBatch& b, const void* in, void* hidden_gradient,
            void* gradients, void* vocabulary_gradients, bool first, double* loss) override {
    trip(Where::head);
    real_->head(w, vocabulary, b, in, hidden_gradient, gradients, vocabulary_gradients, first, loss);
  }
  void cast(const void* from, DType from_type, void* to, DType to_type, int64_t elements) override {
    trip(Where::cast);
    real_->cast(from, from_type, to, to_type, elements);
  }

 private:
  void trip(Where here) {
    if (where_ == here && --left_ == 0) throw std::runtime_error("injected fault");
  }
  std::unique_ptr<Compute> real_;
  const Where where_;
  std::atomic<int> left_;
};

class FaultyCollective final : public Collective {
 public:
  FaultyCollective(std::unique_ptr<Collective> real, int calls) : real_(std::move(real)), left_(calls) {}
  int ranks() const override { return real_->ranks(); }
  void all_gather(int rank, Stream& stream, const void* shard, void* full, int64_t bytes) override {
    trip();
    real_->all_gather(rank, stream, shard, full, bytes);
  }
  void reduce_scatter(int rank, Stream& stream, const void* full, void* shard, int64_t elements, DType type) override {
    trip();
    real_->reduce_scatter(rank, stream, full, shard, elements, type);
  }
  void broadcast(int rank, Stream& stream, void* data, int64_t bytes, int root) override {
    real_->broadcast(rank, stream, data, bytes, root);
  }
  void abort() override { real_->abort(); }

 private:
  void trip() {
    if (--left_ == 0) throw std::runtime_error("injected fault");
  }
  std::unique_ptr<Collective> real_;
  std::atomic<int> left_;
};

TinyTraining::Prepare fault(FaultyCompute::Where where, int calls, size_t rank) {
  return [=](Backend& backend) {
    backend.compute[rank] = std::make_unique<FaultyCompute>(std::move(backend.compute[rank]), where, calls);
  };
}

std::string error_of(const std::function<void()>& run) {
  try {
    run();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

class Failure : public ::testing::Test {
 protected:
  Plan plan() const {
    Plan plan = training_.plan(2, 2);
    plan.delivery = Delivery::sharded;
    plan.reduction = Reduction::gpu;
    plan.wire = DType::bf16;
    using enum ActivationPolicy;
    plan.activation = {offload, keep, offload, recompute};
    return plan;
  }
  TinyTraining training_{true};
};

TEST_F(Failure, InEveryKindOfComputeOnEitherRankIsOneErrorThatNamesTheTask) {
  using Where = FaultyCompute::Where;
  const std::vector<std::pair<Where, std::string>> places{{Where::embedding_forward, "fwd embedding"},
                                                          {Where::embedding_backward, "bwd embedding"},
                                                          {Where::layer_forward, "fwd layer"},
                                                          {Where::layer_backward, "bwd layer"},
                                                          {Where::head, "head head"},
                                                          {Where::cast, "cast "}};
  for (const auto& [where, task] : places) {
    for (const size_t rank : {0, 1}) {
      for (const int calls : {1, 4}) {
        const std::string error =
            error_of([&] { training_.run(plan(), training_.train(), 4, fault(where, calls, rank)); });
        EXPECT_THAT(error, HasSubstr("injected fault"));
        EXPECT_THAT(error, HasSubstr(task));
        EXPECT_THAT(error, HasSubstr("rank " + std::to_string(rank)));
      }
    }
  }
}

TEST_F(Failure, InACollectiveEndsTheRun) {
  for (const int calls : {1, 2, 17, 40}) {
    const std::string error = error_of([&] {
      training_.run(plan(), training_.train(), 4, [&](Backend& backend) {
        backend.collective = std::make_unique<FaultyCollective>(std::move(backend.collective), calls);
      });
    });
    EXPECT_THAT(error, HasSubstr("injected fault"));
  }
}

TEST_F(Failure, InTheWorkOfACollectiveEndsTheRun) {
  for (const int calls : {1, 5, 30}) {
    const std::string error = error_of([&] {
      training_.run(plan(), training_.train(), 4, [&](Backend& backend) {
        Device& device = *backend.devices.front();
        backend.collective = std::make_unique<FailingWork>(std::move(backend.collective), device, calls);
      });
    });
    EXPECT_THAT(error, HasSubstr("injected fault"));
  }
}

TEST_F(Failure, NonFiniteGradientStopsAnEagerRunWithTheTensorsName) {
  const std::string error =
      error_of([&] { training_.run(plan(), training_.train(), 4, fault(FaultyCompute::Where::nan, 3, 1)); });
  EXPECT_THAT(error, HasSubstr("model.layers.1.input_layernorm.weight"));
  EXPECT_THAT(error, HasSubstr("step 2"));  // two micro-batches a step: the third call is in the second step
}

TEST_F(Failure, NonFiniteGradientSkipsADeferredUpdateAndLeavesTheStateAsItWas) {
  Plan deferred = plan();
  deferred.update = UpdatePolicy::deferred;
  const RunResult before = training_.run(deferred, training_.train(), 1);
  const RunResult skipped = training_.run(deferred, training_.train(), 2, fault(FaultyCompute::Where::nan, 4, 1));
  EXPECT_EQ(skipped.skipped, (std::vector<bool>{false, true}));
  EXPECT_FALSE(std::isfinite(skipped.gradient_norms[1]));
  EXPECT_TRUE(skipped.state == before.state);
}

// The same in a row that the lookup touched.
TEST(FailureOfTouchedRows, NonFiniteGradient) {
  const TinyTraining training(true, 64);
  Plan plan = training.plan(2, 1);
  plan.vocabulary_rows = VocabularyRows::touched;
  const std::string eager =
      error_of([&] { training.run(plan, training.train(), 3, fault(FaultyCompute::Where::lookup_nan, 2, 1)); });
  EXPECT_THAT(eager, HasSubstr("step 2"));
  EXPECT_THAT(eager, HasSubstr("model.embed_tokens.weight"));
  plan.update = UpdatePolicy::deferred;
  const RunResult before = training.run(plan, training.train(), 1);
  const RunResult skipped = training.run(plan, training.train(), 2, fault(FaultyCompute::Where::lookup_nan, 2, 1));
  EXPECT_EQ(skipped.skipped, (std::vector<bool>{false, true}));
  EXPECT_TRUE(skipped.state == before.state);
}

TEST(FailureOfTouchedRows, TokenIdOutsideTheVocabulary) {
  const TinyTraining training(true, 64);
  Plan plan = training.plan();
  plan.vocabulary_rows = VocabularyRows::touched;
  const StepGraph graph = build_step_graph(training.model(), training.train(), plan);
  HostState state(graph.layout);
  Backend backend = make_backend(training.model(), graph.layout, plan);
  const PackedDataset data(training.data(), training.model(), plan.seq);
  for (const int32_t id : {-1, static_cast<int32_t>(training.model().vocabulary)}) {
    Executor executor(graph, backend, state);
    StepInput input;
    input.batches.push_back(data.fill(0, plan, 0, executor.batch(0)));
    executor.batch(0)[3] = id;
    EXPECT_THAT(error_of([&] { executor.submit(input); }),
                HasSubstr("Token id " + std::to_string(id) + " is outside the model's vocabulary of 97"));
  }
}

// Destroying an executor with work under way neither hangs nor touches what is gone.
TEST_F(Failure, DestructionWithWorkUnderWay) {
  const Plan plan = this->plan();
  const TrainSpec train = training_.train();
  const StepGraph graph = build_step_graph(training_.model(), train, plan);
  const PackedDataset data(training_.data(), training_.model(), plan.seq);
  for (int delay_us = 0; delay_us < 4000; delay_us += 40) {
    HostState state(graph.layout);
    Backend backend = make_backend(training_.model(), graph.layout, plan);
    Executor executor(graph, backend, state);
    StepInput input;
    input.adam = train.adam;
    input.target_tokens = 1;
    for (int rank = 0; rank < plan.ranks; ++rank) {
      input.batches.push_back(data.fill(0, plan, rank, executor.batch(rank)));
    }
    executor.submit(input);
    std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
  }
}

TEST_F(Failure, CancelEndsCollect) {
  const Plan plan = this->plan();
  const TrainSpec train = training_.train();
  const StepGraph graph = build_step_graph(training_.model(), train, plan);
  HostState state(graph.layout);
  Backend backend = make_backend(training_.model(), graph.layout, plan);
  const PackedDataset data(training_.data(), training_.model(), plan.seq);
  Executor executor(graph, backend, state);
  StepInput input;
  input.adam = train.adam;
  input.target_tokens = 1;
  for (int rank = 0; rank < plan.ranks; ++rank) input.batches.push_back(data.fill(0, plan, rank, executor.batch(rank)));
  executor.submit(input);
  executor.cancel("enough");
  EXPECT_EQ(error_of([&] { executor.collect(std::chrono::seconds(60)); }), "enough");
}

TEST_F(Failure, MemoryBudgetIsEnforcedAndNamesTheBuffer) {
  const Plan plan = this->plan();
  const StepGraph graph = build_step_graph(training_.model(), training_.train(), plan);
  HostState state(graph.layout);
  Backend backend = make_backend(training_.model(), graph.layout, plan, {.memory_budget = 100'000});
  const std::string error = error_of([&] { Executor(graph, backend, state); });
  EXPECT_THAT(error, HasSubstr("rank 0"));
  EXPECT_THAT(error, HasSubstr("slot"));
}

}  // namespace
}  // namespace slidedp::testing
