// Plans over the whole plan space of one tiny model: every legal pair of values of any two dimensions, and random plans
// beside them. Deterministic.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "model/spec/model_spec.h"
#include "model/spec/plan.h"
#include "model/spec/train_spec.h"

namespace slidedp::testing {

// What the space is built around: a plan, legal but for the model, and a training spec of 8 rows, for models of 4
// layers.
struct MatrixBase {
  ModelSpec tied, untied;
  TrainSpec train;
  Plan plan;
};

inline constexpr double kClip = 0.05;  // max_grad_norm of plans that clip; below the norm of every step

struct MatrixPlan {
  bool tied = false;
  Plan plan;
  TrainSpec train;
  std::vector<int> values;  // by dimension
};

class PlanMatrix {
 public:
  // Legal pairs first, each in some plan, then random plans of the groups that these opened, until there are `plans`
  // different ones.
  PlanMatrix(MatrixBase base, size_t plans);

  const std::vector<MatrixPlan>& plans() const { return plans_; }
  size_t covering() const { return covering_; }  // so many plans from the front cover every legal pair
  // Pairs of values that some legal plan has, and of these the ones that no plan of the matrix has.
  size_t legal_pairs() const;
  std::vector<std::string> missing_pairs() const;
  std::vector<std::string> illegal_pairs() const;  // of different dimensions: what validate_plan always refuses
  std::string describe(const MatrixPlan& plan) const;
  // The values that decide the order and rounding of sums: plans that share them compute the same bits.
  std::string group(const MatrixPlan& plan) const;

 private:
  struct Value {
    std::string name;
    std::function<void(MatrixPlan&)> set;
  };
  struct Dimension {
    std::string name;
    bool constrained;  // whether a value can be illegal beside values of other dimensions
    bool rounding;     // decides the order or rounding of sums
    std::vector<Value> values;
  };
  template <typename T, typename Set>
  void add(const char* name, bool constrained, bool rounding, const std::vector<T>& values, Set set);

  void make_dimensions();
  void enumerate_cores();
  void note_legal_pairs();
  MatrixPlan make(const std::vector<int>& values) const;
  bool legal(const MatrixPlan& plan) const;
  void cover(const std::vector<int>& values);
  int gain(const std::vector<int>& values) const;
  std::vector<int> candidate(std::pair<size_t, size_t> pair);
  bool add_random(const std::vector<int>& group);
  size_t pick(size_t count) { return std::uniform_int_distribution<size_t>(0, count - 1)(random_); }
  // Every value of every dimension has a number of its own.
  size_t number(size_t dimension, int value) const { return first_[dimension] + static_cast<size_t>(value); }
  std::pair<size_t, int> value_of(size_t number) const;
  std::string text(size_t number) const;

  enum class Pair : uint8_t { illegal, missing, covered };
  Pair& pair(size_t a, size_t b) { return pairs_[std::min(a, b) * numbers_ + std::max(a, b)]; }
  Pair pair(size_t a, size_t b) const { return pairs_[std::min(a, b) * numbers_ + std::max(a, b)]; }

  MatrixBase base_;
  std::vector<Dimension> dimensions_;
  std::vector<size_t> first_;
  size_t numbers_ = 0;
  std::vector<std::vector<int>> cores_;  // legal values of the constrained dimensions; -1 for the others
  std::vector<Pair> pairs_;
  std::vector<MatrixPlan> plans_;
  size_t covering_ = 0;
  std::mt19937 random_{1};
};

}  // namespace slidedp::testing
