// What slidedp-plan prints: tables for people, one JSON object for programs.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "model/graph/memory.h"
#include "planner/search.h"

namespace slidedp {

// Everything that is reported about one search.
struct Report {
  const ModelSpec& model;
  const TrainSpec& train;
  const HardwareSpec& hardware;
  const Budgets& budgets;
  const SearchResult& result;
  const MemoryTable& memory;  // of the best plan
};

// The fields in short: "2 ranks sharded x gpu, chunk 16.0 MiB, ...".
std::string summary(const Plan& plan);
// "recompute:12,keep:18", as --pin activation takes it; one policy for all layers: "keep".
std::string activation_text(const Plan& plan);

double tokens_per_second(const TrainSpec& train, PredictedSeconds step);

// At most `top` candidates.
std::string render_text(const Report& report, int top);
nlohmann::json render_json(const Report& report, int top);

}  // namespace slidedp
