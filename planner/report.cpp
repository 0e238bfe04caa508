#include "planner/report.h"

#include <algorithm>
#include <vector>

#include "model/base/format.h"

namespace slidedp {
namespace {

using Cells = std::vector<std::string>;

// Columns as wide as their widest cell, two blanks apart; the last column is not padded.
std::string render_table(const std::vector<Cells>& rows) {
  std::vector<size_t> widths(rows.front().size(), 0);
  for (const Cells& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const Cells& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      text += i + 1 < row.size() ? fmt::format("{:<{}}  ", row[i], widths[i]) : row[i];
    }
    text += '\n';
  }
  return text;
}

std::string candidate_table(const Report& report, int top) {
  std::vector<Cells> rows{{"", "step", "tokens/s", "exposed", "bottleneck", "GPU", "host", "plan"}};
  for (size_t i = 0; i < report.result.best.size() && static_cast<int>(i) < top; ++i) {
    const Candidate& c = report.result.best[i];
    rows.push_back({fmt::format("{}", i + 1), format_seconds(c.step.seconds),
                    fmt::format("{:.1f}", tokens_per_second(report.train, c.step)), format_seconds(c.exposed.seconds),
                    c.bottleneck, format_bytes(c.device_bytes), format_bytes(c.host_bytes), summary(c.plan)});
  }
  return render_table(rows);
}

std::string memory_text(const MemoryTable& memory, const Budgets& budgets) {
  const auto part = [](const char* title, const std::vector<MemoryRow>& of, int64_t total, int64_t budget) {
    std::vector<Cells> rows;
    for (const MemoryRow& row : of) rows.push_back({"  " + row.name, format_bytes(row.bytes)});
    rows.push_back({"  sum", fmt::format("{} of {}", format_bytes(total), format_bytes(budget))});
    return fmt::format("{}\n{}", title, render_table(rows));
  };
  return part("GPU memory of the best plan, per rank", memory.device, memory.device_bytes(), budgets.device_bytes) +
         part("Host memory of the best plan", memory.host, memory.host_bytes(), budgets.host_bytes);
}

nlohmann::json plan_json(const Plan& plan) {
  return {{"model", plan.model},
          {"backend", plan.backend},
          {"compute", name(plan.compute)},
          {"seq", plan.seq},
          {"ranks", plan.ranks},
          {"delivery", name(plan.delivery)},
          {"reduction", name(plan.reduction)},
          {"chunk_elements", plan.chunk_elements},
          {"activation", activation_text(plan)},
          {"update", name(plan.update)},
          {"wire", name(plan.wire)},
          {"accumulator", name(plan.accumulator)},
          {"micro_batch_rows", plan.micro_batch_rows},
          {"micro_batches", plan.micro_batches},
          {"waves", plan.waves},
          {"head_chunk_tokens", plan.head_chunk_tokens},
          {"layer_slots", plan.layer_slots},
          {"gradient_slots", plan.gradient_slots},
          {"vocabulary_slots", plan.vocabulary_slots},
          {"vocabulary_kept", plan.vocabulary_kept},
          {"vocabulary_rows", name(plan.vocabulary_rows)},
          {"wire_slots", plan.wire_slots},
          {"landing_slots", plan.landing_slots},
          {"threads.update", plan.threads.update},
          {"threads.compute_per_rank", plan.threads.compute_per_rank}};
}

nlohmann::json memory_json(const std::vector<MemoryRow>& rows) {
  nlohmann::json list = nlohmann::json::array();
  for (const MemoryRow& row : rows) list.push_back({{"name", row.name}, {"bytes", row.bytes}});
  return list;
}

}  // namespace

std::string activation_text(const Plan& plan) {
  std::string text;
  size_t runs = 0;
  for (size_t begin = 0, end = 0; begin < plan.activation.size(); begin = end) {
    while (end < plan.activation.size() && plan.activation[end] == plan.activation[begin]) ++end;
    text += fmt::format("{}{}:{}", runs == 0 ? "" : ",", name(plan.activation[begin]), end - begin);
    ++runs;
  }
  return runs == 1 ? std::string(name(plan.activation.front())) : text;
}

std::string summary(const Plan& plan) {
  return fmt::format(
      "ranks {}, {} x {}, chunk {}, {}, {}, {} x {} x {} rows, accumulator {}, wire {}, slots {}{}, threads "
      "{}+{}",
      plan.ranks, name(plan.delivery), name(plan.reduction), format_bytes(2 * plan.chunk_elements),
      activation_text(plan), name(plan.update), plan.waves, plan.micro_batches, plan.micro_batch_rows,
      name(plan.accumulator), name(plan.wire), plan.layer_slots, plan.vocabulary_kept ? ", vocabulary kept" : "",
      plan.threads.update, plan.threads.compute_per_rank);
}

double tokens_per_second(const TrainSpec& train, PredictedSeconds step) {
  return static_cast<double>(train.tokens_per_step()) / step.seconds;
}

std::string render_text(const Report& report, int top) {
  const SearchResult& result = report.result;
  std::string text = fmt::format("{}: {} rows x {} tokens a step on {}{}\n", report.model.name, report.train.batch_rows,
                                 report.train.seq, report.hardware.name,
                                 report.hardware.measured ? "" : " (not measured: every time is an estimate)");
  text += fmt::format(
      "{} plans looked at: {} do not fit, {} cannot be among the best, {} simulated{}\n\n", result.considered,
      result.over_memory, result.pruned_by_bound, result.simulated,
      result.not_tried > 0 ? fmt::format(", {} not tried, since an estimate is worse", result.not_tried) : "");
  text += candidate_table(report, top) + "\n" + memory_text(report.memory, report.budgets) + "\nWhy this plan\n";
  for (const std::string& sentence : result.why) text += "  " + sentence + "\n";
  return text;
}

nlohmann::json render_json(const Report& report, int top) {
  const SearchResult& result = report.result;
  nlohmann::json best = nlohmann::json::array();
  for (size_t i = 0; i < result.best.size() && static_cast<int>(i) < top; ++i) {
    const Candidate& c = result.best[i];
    best.push_back({{"step_seconds", c.step.seconds},
                    {"bound_seconds", c.bound.seconds},
                    {"exposed_seconds", c.exposed.seconds},
                    {"tokens_per_second", tokens_per_second(report.train, c.step)},
                    {"bottleneck", c.bottleneck},
                    {"device_bytes", c.device_bytes},
                    {"host_bytes", c.host_bytes},
                    {"plan", plan_json(c.plan)}});
  }
  return {{"model", report.model.fingerprint()},
          {"hardware", report.hardware.name},
          {"estimate", !report.hardware.measured},
          {"budgets", {{"device_bytes", report.budgets.device_bytes}, {"host_bytes", report.budgets.host_bytes}}},
          {"best", best},
          {"memory", {{"device", memory_json(report.memory.device)}, {"host", memory_json(report.memory.host)}}},
          {"search",
           {{"exhaustive", result.exhaustive},
            {"considered", result.considered},
            {"over_memory", result.over_memory},
            {"pruned_by_bound", result.pruned_by_bound},
            {"simulated", result.simulated},
            {"not_tried", result.not_tried}}},
          {"why", result.why}};
}

}  // namespace slidedp
