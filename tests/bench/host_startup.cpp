// What a run does before its first step, timed piece by piece beside what the machine can do: allocating and touching
// the host state, registering it with the device, writing a checkpoint and reading it from storage.
//
//   host_startup --model configs/model/Qwen3-4B.json --dir SCRATCH [--backend cuda] [--threads N] > startup.json
#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "model/base/error.h"
#include "model/base/types.h"
#include "model/spec/model_spec.h"
#include "runtime/device/backends.h"
#include "runtime/host/host_state.h"
#include "runtime/host/machine_facts.h"
#include "runtime/io/checkpoint_hf.h"

namespace slidedp {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

double seconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double gbps(int64_t bytes, double seconds) { return static_cast<double>(bytes) / seconds * 1e-9; }

// `work` for each piece of [0, bytes), on `threads` threads.
void in_pieces(int64_t bytes, int threads, const std::function<void(int64_t begin, int64_t size)>& work) {
  constexpr int64_t kPiece = int64_t{8} << 20;
  std::atomic<int64_t> next = 0;
  std::vector<std::jthread> helpers;
  for (int i = 0; i < threads; ++i) {
    helpers.emplace_back([&] {
      for (int64_t at = next.fetch_add(kPiece); at < bytes; at = next.fetch_add(kPiece)) {
        work(at, std::min(kPiece, bytes - at));
      }
    });
  }
}

// Storage must deliver the next read, not the page cache.
void forget(const fs::path& dir) {
  for (const auto& entry : fs::directory_iterator(dir)) {
    const int file = open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) continue;
    fsync(file);
    posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    close(file);
  }
}

// Bytes of all files, read with plain pread into buffers that are thrown away.
int64_t read_all(const fs::path& dir, int threads) {
  int64_t total = 0;
  for (const auto& entry : fs::directory_iterator(dir)) {
    const int file = open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) fail("cannot open " + entry.path().string());
    in_pieces(static_cast<int64_t>(entry.file_size()), threads, [&](int64_t begin, int64_t size) {
      thread_local std::vector<char> buffer(size_t{8} << 20);
      if (pread(file, buffer.data(), static_cast<size_t>(size), begin) != size) std::abort();
    });
    close(file);
    total += static_cast<int64_t>(entry.file_size());
  }
  return total;
}

void fill_weights(HostState& state, int threads) {
  for (const UnitLayout& unit : state.layout().units) {
    uint16_t* hi = state.unit(unit.unit).hi.data();
    in_pieces(unit.elements, threads, [&](int64_t begin, int64_t size) {
      for (int64_t i = begin; i < begin + size; ++i) hi[i] = static_cast<uint16_t>(0x3c00 + (i * 2654435761u) % 0x200);
    });
  }
}

json measure(const ModelSpec& model, const fs::path& dir, const std::string& backend_name, int threads) {
  json result{{"threads", threads}, {"model", model.name}, {"parameters", model.parameters()}};
  HostState state(make_layout(model));
  const int64_t bytes = state.bytes();
  result["state_bytes"] = bytes;
  result["touch_gbps"] = gbps(bytes, seconds([&] { state.touch(threads, nullptr); }));
  for (const Arena& arena : state.arenas()) {
    auto* data = static_cast<char*>(arena.data());
    result["memset_again_gbps"] = gbps(arena.bytes(), seconds([&] {
                                         in_pieces(arena.bytes(), threads, [&](int64_t begin, int64_t size) {
                                           std::memset(data + begin, 0, static_cast<size_t>(size));
                                         });
                                       }));
  }
  Backend backend = make_backend(backend_name, 1);
  result["backend"] = backend_name;
  Device& device = *backend.devices.front();
  double register_s = 0, unregister_s = 0;
  for (const Arena& arena : state.arenas()) {
    register_s += seconds([&] { device.register_host(arena.data(), arena.bytes()); });
  }
  result["register_s_per_gib"] = register_s / (static_cast<double>(bytes) / (1 << 30));
  result["register_gbps"] = gbps(bytes, register_s);

  fill_weights(state, threads);
  const fs::path checkpoint = dir / "host_startup.checkpoint";
  const double write_s = seconds([&] { export_hf_checkpoint(posix_file_system(), {}, state, checkpoint); });
  forget(checkpoint);
  int64_t file_bytes = 0;
  const double raw_s = seconds([&] { file_bytes = read_all(checkpoint, threads); });
  forget(checkpoint);
  const double read_s = seconds([&] { load_hf_checkpoint(checkpoint, state, threads); });
  const double cached_s = seconds([&] { load_hf_checkpoint(checkpoint, state, threads); });
  result["export_gbps"] = gbps(file_bytes, write_s);
  result["raw_read_gbps"] = gbps(file_bytes, raw_s);
  result["checkpoint_read_gbps"] = gbps(file_bytes, read_s);
  result["checkpoint_read_from_cache_gbps"] = gbps(file_bytes, cached_s);
  fs::remove_all(checkpoint);
  for (const Arena& arena : state.arenas()) {
    unregister_s += seconds([&] { device.unregister_host(arena.data()); });
  }
  result["unregister_gbps"] = gbps(bytes, unregister_s);
  return result;
}

int run(int argc, char** argv) {
  CLI::App app{"Times what a run does before its first step; prints JSON."};
  std::string model, dir, backend = "cpu";
  int threads = usable_cores();
  app.add_option("--model", model, "config.json of the model whose state is allocated")->required();
  app.add_option("--dir", dir, "directory on the storage to measure; a checkpoint is written there and removed")
      ->required();
  app.add_option("--backend", backend, "device backend that the state is registered with");
  app.add_option("--threads", threads, "threads (default: all cores)");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : static_cast<int>(ExitCode::usage);
  }
  std::printf("%s\n", measure(load_model_spec(model), dir, backend, threads).dump(2).c_str());
  return 0;
}

}  // namespace
}  // namespace slidedp

int main(int argc, char** argv) { return slidedp::run_program("host_startup", slidedp::run, argc, argv); }
