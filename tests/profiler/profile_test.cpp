#include "profiler/profile.h"

#include <SQLiteCpp/SQLiteCpp.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <set>

#include "model/base/error.h"
#include "model/calibration/profile_store.h"
#include "profiler/registry.h"

namespace slidedp {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (fs::temp_directory_path() / "slidedp_profile_XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~TemporaryFolder() { fs::remove_all(path_); }
  fs::path operator/(const std::string& name) const { return path_ / name; }

 private:
  fs::path path_;
};

std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

// Sets the host's core count to `cores`, or is waived.
class FakeProbe final : public Probe {
 public:
  FakeProbe(std::string key, int cores, std::optional<std::string> waived = std::nullopt)
      : key_(std::move(key)), cores_(cores), waived_(std::move(waived)) {}
  std::string key() const override { return key_; }
  std::string method() const override { return "counts to " + std::to_string(cores_); }
  std::optional<std::string> waived(const ProbeContext&) const override { return waived_; }
  std::vector<Measurement> run(const ProbeContext&) const override {
    ++runs;
    return {{"cores", "1", {{"bytes", 1024}, {"ranks", 2}}, {double(cores_), cores_ + 0.25, cores_ - 0.1}, true}};
  }
  std::vector<Finding> fill(const FillFacts&, std::span<const Measurement> measured,
                            HardwareSpec& spec) const override {
    spec.host.cores = static_cast<int>(median(measured.front().repeats));
    return {finding("host.cores", spec.host.cores, "", 0.125)};
  }
  mutable int runs = 0;

 private:
  std::string key_;
  int cores_;
  std::optional<std::string> waived_;
};

HardwareSpec complete_spec() {
  HardwareSpec spec;
  spec.name = "a test's machine: \"quoted\"";
  spec.measured = true;
  spec.gpus = 2;
  spec.device = {"cpu rank", "cpu", int64_t{1} << 30, 0};
  spec.pcie = {{1e-6, 10}, {2e-6, 9}, 12, 15, 14};
  spec.collectives = {{1e-6, 3}, {1e-6, 4}, {1e-6, 5}};
  spec.kernels = {{50, 0.1}, {51, 0.1}, {52, 0.2}, {1, 0}, 7, 1e-6};
  spec.host = {1, int64_t{1} << 34, 20, 18, 1e9, 2e9, 10};
  return spec;
}

MachineIdentity machine() { return {"node", "a processor", "Linux 6", 2, int64_t{1} << 34, 1 << 20, "a GPU"}; }

ProbeContext context() {
  ProbeContext context = make_context(machine(), default_model(), true);
  context.ranks = 2;
  return context;
}

const Progress kQuiet = [](const ProbePlace&, const ProbeOutcome*) {};

TEST(Registry, KeysAndMethodsAreUniqueAndSaid) {
  std::set<std::string> keys, methods;
  for (const auto& probe : all_probes()) {
    EXPECT_TRUE(keys.insert(probe->key()).second) << probe->key();
    EXPECT_TRUE(methods.insert(probe->method()).second) << probe->key();
    EXPECT_GT(probe->method().size(), 20u) << probe->key();
    EXPECT_EQ(probe->key().find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789._"), std::string::npos)
        << probe->key() << ": keys are stable words for the database and the command line";
  }
  EXPECT_THAT(
      keys, testing::IsSupersetOf({"copy.h2d", "copy.d2h", "host.adam", "host.split", "kernel.layer", "kernel.head"}));
}

TEST(Registry, KernelsAreWaivedWhenMemoryIsShort) {
  ProbeContext small = context();
  small.available_bytes = small.device_available_bytes = 10 << 20;
  small.rolling_bytes = 1 << 20;
  int waived = 0;
  for (const auto& probe : all_probes()) {
    const auto reason = probe->waived(small);
    if (!reason || probe->waived(context())) continue;  // some need a GPU
    ++waived;
    EXPECT_THAT(*reason, HasSubstr("iB")) << probe->key() << ": the reason has the numbers";
  }
  EXPECT_GE(waived, 3);
}

TEST(Registry, WhatNeedsSeveralGpusOrNoneIsWaivedWithTheReason) {
  ProbeContext gpu = context();
  gpu.backend = "cuda";
  gpu.ranks = 1;
  gpu.device_total_bytes = gpu.device_available_bytes = int64_t{80} << 30;
  ProbeContext two = gpu;
  two.ranks = 2;
  for (const auto& probe : all_probes()) {
    if (probe->key() == "device.state") continue;  // asks this machine's driver
    const bool exchanges = probe->key().starts_with("collective.");
    EXPECT_EQ(probe->waived(gpu).has_value(), exchanges) << probe->key();
    EXPECT_FALSE(probe->waived(two)) << probe->key();
    const bool needs_gpu = probe->key() == "host.contention" || probe->key() == "device.context";
    EXPECT_EQ(probe->waived(context()).has_value(), needs_gpu) << probe->key();
  }
}

TEST(Profile, DefaultModelIsTheInstalledConfig) {
  const ModelSpec installed = load_model_spec(fs::path(SLIDEDP_SOURCE_DIR) / "configs/model/SmolLM2-135M.json");
  EXPECT_EQ(default_model().fingerprint(), installed.fingerprint());
}

TEST(Profile, ChoosesByKeyInRegistryOrder) {
  const auto probes = all_probes();
  const std::vector<std::string> wanted{"kernel.head", "host.dram"};
  const auto chosen = choose_probes(probes, wanted);
  // host.dram decides the same values as two others.
  std::vector<std::string> keys;
  for (const Probe* probe : chosen) keys.push_back(probe->key());
  EXPECT_THAT(keys, testing::ElementsAre("host.dram", "host.adam", "host.contention", "kernel.head"));
  EXPECT_EQ(choose_probes(probes, std::vector<std::string>{"kernel.head"}).size(), 1u);
  EXPECT_EQ(choose_probes(probes, {}).size(), probes.size());
  const std::vector<std::string> wrong{"host.dram", "host.damr"};
  const std::string message = message_of([&] { choose_probes(probes, wrong); });
  EXPECT_THAT(message, HasSubstr("\"host.damr\""));
  EXPECT_THAT(message, HasSubstr("kernel.embedding"));
}

TEST(Profile, WaivedProbesAreReportedAndNotRun) {
  const FakeProbe measured("fake.one", 7), waived("fake.two", 9, "this machine has no such thing");
  const std::vector<const Probe*> probes{&measured, &waived};
  std::vector<std::string> log;
  const ProfileRun run = run_profile(probes, context(), machine(), complete_spec(),
                                     [&](const ProbePlace& place, const ProbeOutcome* outcome) {
                                       log.push_back(std::to_string(place.round) + "/" + std::to_string(place.index) +
                                                     " " + place.probe.key() + (outcome ? " done" : " starts"));
                                     });
  EXPECT_EQ(waived.runs, 0);
  EXPECT_EQ(measured.runs, 2) << "--quick has two rounds";
  EXPECT_THAT(log, testing::ElementsAre("0/0 fake.one starts", "0/0 fake.one done", "0/1 fake.two starts",
                                        "0/1 fake.two done", "1/0 fake.one starts", "1/0 fake.one done",
                                        "1/1 fake.two starts", "1/1 fake.two done"));
  EXPECT_EQ(run.spec.host.cores, 7);
  ASSERT_EQ(run.outcomes.size(), 2u);
  EXPECT_FALSE(run.outcomes[0].waived);
  EXPECT_EQ(run.outcomes[1].waived, "this machine has no such thing");
  EXPECT_THAT(profile_text(run), HasSubstr("fake.two: waived: this machine has no such thing"));
  EXPECT_THAT(profile_text(run), HasSubstr("host.cores = 7  se 7.4 %"));
  EXPECT_THAT(profile_text(run), HasSubstr("Linux 6, a GPU."));
}

// Fails after a part of its work.
class FailingProbe final : public Probe {
 public:
  explicit FailingProbe(ExitCode code) : code_(code) {}
  std::string key() const override { return "fake.failing"; }
  std::string method() const override { return "measures, and cannot make sense of it"; }
  std::vector<Measurement> run(const ProbeContext&) const override { return {{"cores", "1", {}, {3}, true}}; }
  std::vector<Finding> fill(const FillFacts&, std::span<const Measurement>, HardwareSpec& spec) const override {
    spec.host.cores = 99;
    throw Error("the cores do not add up", code_);
  }

 private:
  ExitCode code_;
};

TEST(Profile, FailingProbeLeavesTheOthersTheirResults) {
  const FailingProbe failing(ExitCode::failure);
  const FakeProbe after("fake.one", 7);
  const std::vector<const Probe*> both{&failing, &after}, alone{&failing};
  const ProfileRun run = run_profile(both, context(), machine(), complete_spec(), kQuiet);
  ASSERT_EQ(run.outcomes.size(), 2u);
  EXPECT_EQ(run.outcomes[0].waived, "it failed: the cores do not add up");
  EXPECT_EQ(run.outcomes[0].measurements.size(), 1u) << "for the database";
  EXPECT_EQ(run.spec.host.cores, 7);
  HardwareSpec unchanged = run_profile(alone, context(), machine(), complete_spec(), kQuiet).spec;
  EXPECT_EQ(unchanged.uncertainty.waived.at(0).probe, "fake.failing");
  unchanged.uncertainty = {};
  EXPECT_EQ(unchanged, complete_spec());
  const FailingProbe interrupted(ExitCode::interrupted);
  const std::vector<const Probe*> stopped{&interrupted, &after};
  EXPECT_THROW(run_profile(stopped, context(), machine(), complete_spec(), kQuiet), Error);
}

TEST(Profile, FileLoadsStrictlyAndHasEveryValue) {
  const TemporaryFolder folder;
  const FakeProbe probe("fake.one", 7);
  const std::vector<const Probe*> probes{&probe};
  const ProfileRun run = run_profile(probes, context(), machine(), complete_spec(), kQuiet);
  write_profile(run, folder / "hw.yaml");
  HardwareSpec expected = complete_spec();
  expected.host.cores = 7;
  expected.uncertainty = run.spec.uncertainty;
  EXPECT_EQ(load_hardware_spec(folder / "hw.yaml"), expected);
  EXPECT_NE(expected.uncertainty.error_of("host.cores"), nullptr) << "this probe times its cores";
  EXPECT_FALSE(fs::exists(folder / "hw.yaml.partial"));
}

TEST(Profile, MissingValuesAreNotWritten) {
  const TemporaryFolder folder;
  const FakeProbe probe("fake.one", 7), waived("fake.two", 9, "no memory");
  const std::vector<const Probe*> probes{&probe, &waived};
  HardwareSpec incomplete = complete_spec();
  incomplete.kernels.head = {};
  const ProfileRun run = run_profile(probes, context(), machine(), incomplete, kQuiet);
  const std::string message = message_of([&] { write_profile(run, folder / "hw.yaml"); });
  EXPECT_THAT(message, HasSubstr("not complete"));
  EXPECT_THAT(message, HasSubstr("fake.two: no memory"));
  EXPECT_FALSE(fs::exists(folder / "hw.yaml"));
  EXPECT_FALSE(fs::exists(folder / "hw.yaml.partial"));
}

TEST(Profile, FailedWriteKeepsTheOldFile) {
  const TemporaryFolder folder;
  const FakeProbe probe("fake.one", 7);
  const std::vector<const Probe*> probes{&probe};
  const ProfileRun run = run_profile(probes, context(), machine(), complete_spec(), kQuiet);
  EXPECT_THAT(message_of([&] { write_profile(run, folder / "none/hw.yaml"); }), HasSubstr("none/hw.yaml"));
  // The partial file cannot be created where a folder has its name.
  write_profile(run, folder / "hw.yaml");
  fs::create_directory(folder / "hw.yaml.partial");
  EXPECT_THAT(message_of([&] { write_profile(run, folder / "hw.yaml"); }), HasSubstr("hw.yaml: cannot be written"));
  EXPECT_EQ(load_hardware_spec(folder / "hw.yaml").host.cores, 7);
}

TEST(Store, SamplesComeBackAsTheyWere) {
  const TemporaryFolder folder;
  const fs::path file = folder / "p.db";
  const FakeProbe probe("fake.one", 7), waived("fake.two", 9, "no memory");
  const std::vector<const Probe*> probes{&probe, &waived};
  const ProfileRun run = run_profile(probes, context(), machine(), complete_spec(), kQuiet);
  check_profile_store(file);
  EXPECT_FALSE(fs::exists(file)) << "checking creates nothing";
  const int64_t first = save_profile(run, file), second = save_profile(run, file);
  EXPECT_NE(first, second);
  check_profile_store(file);
  EXPECT_THAT(stored_profiles(file), testing::ElementsAre(first, second));
  for (int64_t id : {first, second}) {
    const ProfileRun stored = load_profile(file, id);
    EXPECT_EQ(stored.machine.gpu, "a GPU");
    EXPECT_EQ(stored.machine.memory_bytes, machine().memory_bytes);
    EXPECT_EQ(stored.backend, run.backend);
    EXPECT_EQ(stored.model, run.model);
    EXPECT_EQ(stored.ranks, run.ranks);
    EXPECT_EQ(stored.rounds, 2);
    EXPECT_EQ(stored.program_version, run.program_version);
    EXPECT_EQ(stored.started_unix_s, run.started_unix_s);
    EXPECT_EQ(stored.seconds, run.seconds);
    EXPECT_EQ(stored.other_threads, run.other_threads);
    ASSERT_EQ(stored.outcomes.size(), 2u);
    EXPECT_EQ(stored.outcomes[0].key, "fake.one");
    EXPECT_EQ(stored.outcomes[0].method, probe.method());
    EXPECT_EQ(stored.outcomes[1].waived, "no memory");
    ASSERT_EQ(stored.outcomes[0].measurements.size(), 1u);
    const Measurement &read = stored.outcomes[0].measurements[0], &taken = run.outcomes[0].measurements[0];
    EXPECT_EQ(read.value_name, "cores");
    EXPECT_EQ(read.unit, "1");
    EXPECT_EQ(read.parameters, (std::map<std::string, double>{{"bytes", 1024}, {"ranks", 2}}));
    EXPECT_EQ(read.repeats, taken.repeats);
    EXPECT_EQ(read.rounds, (std::vector<int>{0, 0, 0, 1, 1, 1}));
  }
  EXPECT_THAT(message_of([&] { load_profile(file, 9); }), HasSubstr("holds no profile 9; there are 1, 2"));
  SQLite::Database database(file.string());
  EXPECT_EQ(database.execAndGet("SELECT count(*) FROM machine").getInt(), 1) << "one machine, two profiles";
  EXPECT_EQ(database.execAndGet("SELECT gpu FROM machine").getString(), "a GPU");
  EXPECT_EQ(database.execAndGet("SELECT waived FROM probe WHERE key = 'fake.two' LIMIT 1").getString(), "no memory");
  EXPECT_EQ(database.execAndGet("PRAGMA user_version").getInt(), kProfileStoreVersion);
  EXPECT_EQ(database.execAndGet("SELECT sum(json_extract(parameters, '$.bytes')) FROM samples").getInt(), 12 * 1024);
}

TEST(Store, ReadsTheVersionBeforeRoundsAndMovesOn) {
  const TemporaryFolder folder;
  const fs::path file = folder / "p.db";
  {
    SQLite::Database database(file.string(), SQLite::OPEN_READWRITE | SQLite::OPEN_CREATE);
    database.exec(R"(
CREATE TABLE machine (
  id INTEGER PRIMARY KEY, host TEXT NOT NULL, processor TEXT NOT NULL, kernel TEXT NOT NULL, cores INTEGER NOT NULL,
  memory_bytes INTEGER NOT NULL, last_level_cache_bytes INTEGER NOT NULL, gpu TEXT NOT NULL,
  UNIQUE (host, processor, kernel, cores, memory_bytes, last_level_cache_bytes, gpu));
CREATE TABLE profile (
  id INTEGER PRIMARY KEY, machine_id INTEGER NOT NULL REFERENCES machine(id), started_at INTEGER NOT NULL,
  seconds REAL NOT NULL, backend TEXT NOT NULL, ranks INTEGER NOT NULL, model TEXT NOT NULL, quick INTEGER NOT NULL);
CREATE TABLE probe (
  profile_id INTEGER NOT NULL REFERENCES profile(id), key TEXT NOT NULL, method TEXT NOT NULL, waived TEXT,
  seconds REAL NOT NULL, PRIMARY KEY (profile_id, key));
CREATE TABLE samples (
  profile_id INTEGER NOT NULL REFERENCES profile(id), machine_id INTEGER NOT NULL REFERENCES machine(id),
  probe TEXT NOT NULL, parameters TEXT NOT NULL, value_name TEXT NOT NULL, value REAL NOT NULL, unit TEXT NOT NULL,
  repeat_index INTEGER NOT NULL, taken_at INTEGER NOT NULL);
INSERT INTO machine VALUES (1, 'node', 'a processor', 'Linux', 4, 1024, 0, '');
INSERT INTO profile VALUES (1, 1, 1790000000, 2.5, 'cpu', 2, 'a model', 1);
INSERT INTO probe VALUES (1, 'host.norm', 'norms', NULL, 0.5);
INSERT INTO samples VALUES (1, 1, 'host.norm', '{"elements":10.0}', 'seconds', 0.25, 's', 0, 1790000001);
INSERT INTO samples VALUES (1, 1, 'host.norm', '{"elements":10.0}', 'seconds', 0.5, 's', 1, 1790000001);
PRAGMA user_version = 2;)");
  }
  const ProfileRun old = load_profile(file, 1);
  EXPECT_EQ(old.rounds, 1);
  EXPECT_EQ(old.ranks, 2);
  ASSERT_EQ(old.outcomes.size(), 1u);
  EXPECT_EQ(old.outcomes[0].measurements.at(0).repeats, (std::vector<double>{0.25, 0.5}));
  const FakeProbe probe("fake.one", 7);
  const std::vector<const Probe*> probes{&probe};
  check_profile_store(file);
  const int64_t id = save_profile(run_profile(probes, context(), machine(), complete_spec(), kQuiet), file);
  EXPECT_EQ(load_profile(file, id).rounds, 2);
  EXPECT_EQ(load_profile(file, 1).outcomes[0].measurements.at(0).repeats, (std::vector<double>{0.25, 0.5}));
}

TEST(Store, RefusesWhatIsNotItsDatabase) {
  const TemporaryFolder folder;
  EXPECT_THAT(message_of([&] { check_profile_store(folder / "none/p.db"); }), HasSubstr("does not exist"));
  std::ofstream(folder / "text.db") << "this is no database, however long the text may be, and it is quite long";
  EXPECT_THAT(message_of([&] { check_profile_store(folder / "text.db"); }), HasSubstr("text.db"));
  {
    SQLite::Database database((folder / "other.db").string(), SQLite::OPEN_READWRITE | SQLite::OPEN_CREATE);
    database.exec("CREATE TABLE mine (x)");
  }
  EXPECT_THAT(message_of([&] { check_profile_store(folder / "other.db"); }), HasSubstr("not a profile database"));
  {
    SQLite::Database database((folder / "newer.db").string(), SQLite::OPEN_READWRITE | SQLite::OPEN_CREATE);
    database.exec("CREATE TABLE samples (x); PRAGMA user_version = 99");
  }
  EXPECT_THAT(message_of([&] { check_profile_store(folder / "newer.db"); }), HasSubstr("its version is 99"));
}

}  // namespace
}  // namespace slidedp
