// How a measured profile came about and how certain its values are: the section `uncertainty` of a hardware profile.
#pragma once

#include <string>
#include <vector>

namespace slidedp {

// Standard error of a value, in the value's own unit. Exact facts (cores, memory) have none.
struct FieldError {
  std::string field;  // YAML path, "pcie.h2d.gbps"
  double value = 0;   // the standard error
  std::string probe;  // where the value comes from
  bool operator==(const FieldError&) const = default;
};

// Of the two parameters of one fit.
struct FieldCorrelation {
  std::string first, second;  // YAML paths
  double value = 0;           // -1 ... 1
  bool operator==(const FieldCorrelation&) const = default;
};

struct FitQuality {
  std::string fit;  // "kernel.layer forward"
  int samples = 0;
  double residual_rms = 0;  // in log: 0.05 means about 5 %
  bool structured = false;  // the law misses the samples by more than their scatter explains
  bool deficient = false;   // the samples do not determine both parameters
  bool operator==(const FitQuality&) const = default;
};

struct WaivedProbe {
  std::string probe, reason;
  bool operator==(const WaivedProbe&) const = default;
};

// Of a correction from runs: the rates that one kind of task depends on were multiplied.
struct KindCorrection {
  std::string kind;
  double factor = 1;          // on the rates
  double standard_error = 0;  // of the factor
  bool operator==(const KindCorrection&) const = default;
};

struct Uncertainty {
  std::string measured_at;  // UTC; empty: nothing is known, and the profile has no such section
  std::string program_version;
  std::string host, processor, kernel, gpu;  // of the machine that was measured
  std::string kernel_shapes;                 // the model whose shapes kernels were measured at
  int rounds = 0;                            // that every probe was repeated in
  bool quick = false;
  std::vector<FieldError> standard_errors;
  std::vector<FieldCorrelation> correlations;
  std::vector<FitQuality> fits;
  std::vector<WaivedProbe> waived;
  std::vector<std::string> notes;
  std::vector<KindCorrection> corrections;
  bool operator==(const Uncertainty&) const = default;

  bool known() const { return !measured_at.empty(); }
  // nullptr: the value is exact, or nothing is known.
  const FieldError* error_of(const std::string& field) const;
};

}  // namespace slidedp
