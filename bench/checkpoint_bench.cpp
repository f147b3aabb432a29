// A checkpoint of about 1 GB: saving, loading, and what saving behind training
// costs it; against raw writes and reads of the same bytes.
//
//   tessera run -n 2 --cpu-threads 1 checkpoint_bench FOLDER
//   checkpoint_bench FOLDER load_world1      what two ranks saved there
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <fcntl.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "gpt.h"

namespace {

namespace fs = std::filesystem;
namespace ckpt = tessera::checkpoint;

constexpr int kRepeats = 7;
constexpr size_t kRawBytes = size_t{16} << 20; // of one raw write or read
constexpr double kMega = 1e6;

double megabytes_in_status(const char* field) {
  std::ifstream status("/proc/self/status");
  std::string word;
  double kilobytes = 0;
  while (status >> word) {
    if (word == field) {
      status >> kilobytes;
    }
  }
  return kilobytes * 1024 / kMega;
}

/// Memory that a call took at most, beyond what was there.
double extra_megabytes(const std::function<void()>& body) {
  malloc_trim(0);
  std::ofstream("/proc/self/clear_refs") << "5";
  const double before = megabytes_in_status("VmHWM:");
  body();
  return megabytes_in_status("VmHWM:") - before;
}

double slowest(const tessera::Group& world, double value) {
  auto all = torch::full({1}, value, torch::kDouble);
  world.all_reduce(all, tessera::ReduceOp::Max);
  return all.item<double>();
}

double milliseconds(
    const tessera::Group& world,
    const std::function<void()>& body) {
  world.barrier();
  const auto start = std::chrono::steady_clock::now();
  body();
  const std::chrono::duration<double, std::milli> elapsed =
      std::chrono::steady_clock::now() - start;
  return slowest(world, elapsed.count());
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double spread(const std::vector<double>& values) {
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  return (*most - *least) / median(values);
}

void print_row(
    const std::string& name,
    const char* unit,
    const std::vector<double>& values,
    const std::vector<double>& limits = {}) {
  std::printf(
      "{\"name\": \"checkpoint/%s\", \"unit\": \"%s\", \"ours\": %.3f, "
      "\"peers\": {}, ",
      name.c_str(),
      unit,
      median(values));
  if (!limits.empty()) {
    std::printf(
        "\"limit\": %.3f, \"limit_spread\": %.2f, ",
        median(limits),
        spread(limits));
  }
  std::printf(
      "\"repeats\": %zu, \"spread\": %.2f}\n", values.size(), spread(values));
  std::fflush(stdout);
}

/// All tensors of this rank, as bytes.
std::vector<std::pair<char*, size_t>> memory_of(
    const tessera::StateDict& dict) {
  std::vector<std::pair<char*, size_t>> parts;
  const auto add = [&](const torch::Tensor& tensor) {
    parts.emplace_back(
        static_cast<char*>(tensor.mutable_data_ptr()), tensor.nbytes());
  };
  for (const auto& leaf : tessera::flatten(dict).leaves) {
    if (leaf.value.is_sharded()) {
      for (const auto& piece : leaf.value.sharded().pieces()) {
        add(piece.tensor);
      }
    } else if (leaf.value.is_tensor()) {
      add(leaf.value.tensor());
    }
  }
  return parts;
}

/// Writes and syncs, or reads, the same bytes with nothing around them.
void raw(
    const std::string& path,
    const std::vector<std::pair<char*, size_t>>& parts,
    bool writes) {
  const int file = ::open(
      path.c_str(), writes ? O_WRONLY | O_CREAT | O_TRUNC : O_RDONLY, 0666);
  for (auto [data, size] : parts) {
    while (size > 0) {
      const size_t part = std::min(size, kRawBytes);
      const ssize_t done =
          writes ? ::write(file, data, part) : ::read(file, data, part);
      if (done <= 0) {
        throw std::runtime_error("raw I/O failed: " + path);
      }
      data += done;
      size -= static_cast<size_t>(done);
    }
  }
  if (writes && ::fsync(file) != 0) {
    throw std::runtime_error("fsync failed: " + path);
  }
  ::close(file);
}

/// The small files, syncs and the rename that go with a checkpoint.
void raw_commit(const fs::path& folder) {
  const fs::path partial = folder / "raw.partial";
  const fs::path done = folder / "raw.done";
  fs::remove_all(done);
  fs::create_directory(partial);
  const auto sync = [](const fs::path& path) {
    const int file = ::open(path.c_str(), O_RDONLY);
    ::fsync(file);
    ::close(file);
  };
  for (const char* name : {"metadata", "checksums"}) {
    std::ofstream(partial / name) << std::string(20000, 'x');
    sync(partial / name);
  }
  sync(partial);
  fs::rename(partial, done);
  sync(folder);
}

struct Run {
  explicit Run(bool sharded) {
    torch::manual_seed(0);
    gpt = bench::Gpt(config);
    if (sharded) {
      for (auto& block : gpt->children()) {
        if (dynamic_cast<bench::BlockImpl*>(block.get()) != nullptr) {
          tessera::fully_shard(*block);
        }
      }
      tessera::fully_shard(*gpt);
    }
    optimizer = std::make_unique<tessera::optim::AdamW>(
        tessera::parameters(*gpt), 1e-4);
    ids = torch::randint(config.vocabulary, {config.batch, config.length});
  }
  void step() {
    gpt->forward(ids).square().mean().backward();
    optimizer->step();
    optimizer->zero_grad();
  }
  tessera::StateDict state() {
    auto state = tessera::get_state_dict(*gpt, {*optimizer});
    return {{"model", state.model}, {"optim", state.optimizer}};
  }

  const bench::GptConfig config{
      .vocabulary = 1024,
      .width = 768,
      .heads = 12,
      .layers = 12,
      .length = 64,
      .batch = 1};
  bench::Gpt gpt{nullptr};
  std::unique_ptr<tessera::optim::AdamW> optimizer;
  torch::Tensor ids;
};

void load_world1(const tessera::Group& world, const fs::path& folder) {
  Run run(false);
  tessera::StateDict state = run.state();
  const auto parts = memory_of(state);
  const std::string path = folder / "raw_world1";
  raw(path, parts, true);
  std::vector<double> loads;
  std::vector<double> limits;
  for (int i = 0; i < kRepeats; ++i) {
    limits.push_back(milliseconds(world, [&] { raw(path, parts, false); }));
    loads.push_back(
        milliseconds(world, [&] { ckpt::load(state, folder / "kept"); }));
  }
  fs::remove(path);
  print_row("load_world1/1GB", "ms", loads, limits);
}

void save_and_load(const tessera::Group& world, const fs::path& folder) {
  Run run(true);
  run.step();
  run.step();
  tessera::StateDict state = run.state();
  const auto clean = [&] {
    world.barrier();
    if (world.rank() == 0) {
      fs::remove_all(folder / "c");
      ::sync();
    }
    world.barrier();
  };
  const std::string raw_path = folder / ("raw" + std::to_string(world.rank()));
  const auto parts = memory_of(state);
  const double save_memory =
      extra_megabytes([&] { ckpt::save(state, folder / "c"); });
  const double load_memory =
      extra_megabytes([&] { ckpt::load(state, folder / "c"); });

  std::vector<double> saves;
  std::vector<double> raw_writes;
  std::vector<double> loads;
  std::vector<double> raw_reads;
  const auto write_raw = [&] {
    clean();
    raw_writes.push_back(milliseconds(world, [&] {
      raw(raw_path, parts, true);
      world.barrier();
      if (world.rank() == 0) {
        raw_commit(folder);
      }
      world.barrier();
    }));
  };
  const auto save = [&] {
    clean();
    saves.push_back(
        milliseconds(world, [&] { ckpt::save(state, folder / "c"); }));
  };
  // A virtual disk is slow where nothing was ever written.
  for (int i = 0; i < 4; ++i) {
    raw(raw_path + "_warm" + std::to_string(i), parts, true);
  }
  for (int i = 0; i < 4; ++i) {
    fs::remove(raw_path + "_warm" + std::to_string(i));
  }
  for (int i = 0; i < kRepeats; ++i) {
    fs::remove(raw_path);
    // In turns: what comes second finds the disk busier.
    if (i % 2 == 0) {
      write_raw();
      save();
    } else {
      save();
      write_raw();
      save(); // write_raw() has removed it
      saves.pop_back();
    }
    raw_reads.push_back(
        milliseconds(world, [&] { raw(raw_path, parts, false); }));
    loads.push_back(
        milliseconds(world, [&] { ckpt::load(state, folder / "c"); }));
  }
  fs::remove(raw_path);

  // Behind training: the call, and the step that follows it.
  std::vector<double> stalls;
  std::vector<double> steps_after;
  std::vector<double> steps;
  std::vector<double> ends;
  double stage_memory = 0;
  for (int i = 0; i < kRepeats; ++i) {
    clean();
    steps.push_back(milliseconds(world, [&] { run.step(); }));
    ckpt::AsyncSave saving;
    const tessera::StateDict now = run.state();
    const auto start = std::chrono::steady_clock::now();
    stage_memory = std::max(
        stage_memory, extra_megabytes([&] {
          stalls.push_back(milliseconds(
              world, [&] { saving = ckpt::async_save(now, folder / "c"); }));
          steps_after.push_back(milliseconds(world, [&] { run.step(); }));
          saving.wait();
        }));
    const std::chrono::duration<double, std::milli> elapsed =
        std::chrono::steady_clock::now() - start;
    ends.push_back(slowest(world, elapsed.count()));
  }
  world.barrier();
  if (world.rank() == 0) {
    fs::rename(folder / "c", folder / "kept");
    const std::string place = "/1GB/cpu" + std::to_string(world.size());
    print_row("save" + place, "ms", saves, raw_writes);
    print_row("load" + place, "ms", loads, raw_reads);
    print_row("async_stall" + place, "ms", stalls);
    print_row("async_until_done" + place, "ms", ends);
    print_row("async_next_step" + place, "ms", steps_after, steps);
    print_row("peak-memory/save" + place, "MB", {save_memory});
    print_row("peak-memory/load" + place, "MB", {load_memory});
    print_row("peak-memory/async" + place, "MB", {stage_memory});
  }
}

} // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: checkpoint_bench FOLDER [load_world1]\n");
    return 2;
  }
  const auto world = tessera::init();
  if (argc > 2) {
    load_world1(world, argv[1]);
  } else {
    save_and_load(world, argv[1]);
  }
  return 0;
}
