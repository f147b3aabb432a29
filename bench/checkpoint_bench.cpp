// A checkpoint of about 1 GB: saving, loading, and what saving in the
// background costs training; compared with raw writes and reads of the same
// bytes.
//
//   tessera run -n 2 --cpu-threads 1 checkpoint_bench FOLDER
//   checkpoint_bench FOLDER load_world1      what two ranks saved there
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gpt.h"
#include "harness.h"

namespace {

namespace fs = std::filesystem;
namespace ckpt = tessera::checkpoint;
using bench::Arguments;
using bench::extra_megabytes;
using bench::milliseconds;
using bench::Samples;

constexpr int kRepeats = 4; // per round
constexpr size_t kRawBytes = size_t{16} << 20; // of one raw write or read

/// All tensors of this rank, as bytes.
std::vector<std::pair<char*, size_t>> memory_of(
    const tessera::StateDict& dict) {
  std::vector<std::pair<char*, size_t>> parts;
  const auto add = [&](const torch::Tensor& tensor) {
    parts.emplace_back(
        static_cast<char*>(tensor.mutable_data_ptr()), tensor.nbytes());
  };
  for (const auto& leaf : tessera::flatten_state_dict(dict).leaves) {
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

/// Writes and syncs, or reads, the same bytes without any format.
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

/// The small files, the syncs and the rename of a checkpoint.
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

/// A GPT that trains.
struct Run {
  Run(const Arguments& arguments, bool sharded)
      : config{
            .vocabulary = 1024,
            .width = arguments.is_quick() ? 96 : 768,
            .heads = 12,
            .layers = 12,
            .length = 64,
            .batch = 1} {
    torch::manual_seed(0);
    gpt = bench::Gpt(config);
    if (sharded) {
      for (const auto& block : *gpt->blocks) {
        tessera::fully_shard(block);
      }
      tessera::fully_shard(gpt);
    }
    optimizer =
        std::make_unique<tessera::optim::AdamW>(tessera::parameters(gpt), 1e-4);
    ids = torch::randint(config.vocabulary, {config.batch, config.length});
  }

  void step() {
    gpt->forward(ids).square().mean().backward();
    optimizer->step();
    optimizer->zero_grad();
  }

  tessera::StateDict state() {
    auto state = tessera::get_state_dict(gpt, {*optimizer});
    return {{"model", state.model}, {"optim", state.optimizer}};
  }

  const bench::GptConfig config;
  bench::Gpt gpt{nullptr};
  std::unique_ptr<tessera::optim::AdamW> optimizer;
  torch::Tensor ids;
};

void load_world1(
    const Arguments& arguments,
    const tessera::Group& world,
    const fs::path& folder) {
  Run run(arguments, false);
  tessera::StateDict state = run.state();
  const auto parts = memory_of(state);
  const std::string path = folder / "raw_world1";
  raw(path, parts, true);
  bench::Row row{"checkpoint/load_world1/1GB/cpu1", "ms", {}};
  for (int i = 0; i < arguments.times(kRepeats); ++i) {
    row.limit.push_back(milliseconds(world, [&] { raw(path, parts, false); }));
    row.ours.push_back(
        milliseconds(world, [&] { ckpt::load(state, folder / "kept"); }));
  }
  fs::remove(path);
  bench::print(row);
}

bench::Row row_of(
    const tessera::Group& world,
    const std::string& what,
    const char* unit) {
  const std::string ranks = std::to_string(world.size());
  return {"checkpoint/" + what + "/1GB/cpu" + ranks, unit, {}};
}

void print_on_rank_0(
    const tessera::Group& world,
    const std::vector<bench::Row>& rows) {
  for (const auto& row : rows) {
    if (world.rank() == 0) {
      bench::print(row);
    }
  }
}

/// All ranks save to and load from `folder`.
class Saves {
 public:
  Saves(
      const Arguments& arguments,
      const tessera::Group& world,
      const fs::path& folder)
      : repeats_(arguments.times(kRepeats)),
        warming_files_(arguments.times(4)),
        world_(world),
        folder_(folder),
        raw_path_(folder / ("raw" + std::to_string(world.rank()))),
        run_(arguments, true) {
    run_.step();
    run_.step();
    state_ = run_.state();
    parts_ = memory_of(state_);
  }

  /// Compared with raw writes and reads.
  void measure_calls() {
    bench::Row saves = row_of(world_, "save", "ms");
    bench::Row loads = row_of(world_, "load", "ms");
    bench::Row save_memory = row_of(world_, "peak-memory/save", "MB");
    bench::Row load_memory = row_of(world_, "peak-memory/load", "MB");
    save_memory.ours = {extra_megabytes([&] { save(); })};
    load_memory.ours = {extra_megabytes([&] { load(); })};
    warm_disk();
    for (int i = 0; i < repeats_; ++i) {
      fs::remove(raw_path_);
      // The sides take turns: the second one finds the disk busier.
      if (i % 2 == 0) {
        saves.limit.push_back(time_raw_write());
        saves.ours.push_back(time_save());
      } else {
        saves.ours.push_back(time_save());
        saves.limit.push_back(time_raw_write());
        time_save(); // the raw write has removed it
      }
      loads.limit.push_back(
          milliseconds(world_, [&] { raw(raw_path_, parts_, false); }));
      loads.ours.push_back(milliseconds(world_, [&] { load(); }));
    }
    fs::remove(raw_path_);
    print_on_rank_0(world_, {saves, loads, save_memory, load_memory});
  }

  /// Saving in the background: the call, and the step that follows it.
  void measure_async() {
    bench::Row stalls = row_of(world_, "async_stall", "ms");
    bench::Row ends = row_of(world_, "async_until_done", "ms");
    bench::Row steps = row_of(world_, "async_next_step", "ms");
    bench::Row memory = row_of(world_, "peak-memory/async", "MB");
    for (int i = 0; i < repeats_; ++i) {
      clean();
      steps.limit.push_back(milliseconds(world_, [&] { run_.step(); }));
      const tessera::StateDict now = run_.state();
      ckpt::AsyncSave saving;
      const auto save_and_step = [&] {
        stalls.ours.push_back(milliseconds(
            world_, [&] { saving = ckpt::async_save(now, folder_ / "c"); }));
        steps.ours.push_back(milliseconds(world_, [&] { run_.step(); }));
        saving.wait();
      };
      memory.ours.push_back(extra_megabytes(
          [&] { ends.ours.push_back(milliseconds(world_, save_and_step)); }));
    }
    print_on_rank_0(world_, {stalls, ends, steps, memory});
  }

  /// Keeps the last checkpoint, for load_world1.
  void keep() {
    world_.barrier();
    if (world_.rank() == 0) {
      fs::remove_all(folder_ / "kept");
      fs::rename(folder_ / "c", folder_ / "kept");
    }
  }

 private:
  void save() {
    ckpt::save(state_, folder_ / "c", ckpt::SaveOptions().overwrite(true));
  }

  void load() {
    ckpt::load(state_, folder_ / "c");
  }

  double time_save() {
    clean();
    return milliseconds(world_, [&] { save(); });
  }

  double time_raw_write() {
    clean();
    return milliseconds(world_, [&] {
      raw(raw_path_, parts_, true);
      world_.barrier();
      if (world_.rank() == 0) {
        raw_commit(folder_);
      }
      world_.barrier();
    });
  }

  void clean() const {
    world_.barrier();
    if (world_.rank() == 0) {
      fs::remove_all(folder_ / "c");
      ::sync();
    }
    world_.barrier();
  }

  /// A virtual disk is slow where nothing has been written before.
  void warm_disk() const {
    const auto path = [&](int i) {
      return raw_path_ + "_warm" + std::to_string(i);
    };
    for (int i = 0; i < warming_files_; ++i) {
      raw(path(i), parts_, true);
    }
    for (int i = 0; i < warming_files_; ++i) {
      fs::remove(path(i));
    }
  }

  const int repeats_;
  const int warming_files_;
  const tessera::Group world_;
  const fs::path folder_;
  const std::string raw_path_;
  Run run_;
  tessera::StateDict state_;
  std::vector<std::pair<char*, size_t>> parts_;
};

/// Plain tensors that every rank has, with the state of LibTorch's AdamW.
class Copies {
 public:
  Copies(
      const Arguments& arguments,
      const tessera::Group& world,
      const fs::path& folder)
      : repeats_(arguments.times(kRepeats)), world_(world), folder_(folder) {
    const int64_t numel = arguments.is_quick() ? 1 << 15 : 1 << 21;
    for (int i = 0; i < kTensors; ++i) {
      params_.push_back(torch::ones({numel}).requires_grad_());
      params_.back().mutable_grad() = torch::ones({numel});
    }
    optimizer_ = std::make_unique<torch::optim::AdamW>(params_);
    optimizer_->step();
  }

  /// The optimizer steps at once: everything that is not on disk yet is copied.
  void measure_async() {
    bench::Row stalls = row_of(world_, "async_stall_copies", "ms");
    bench::Row steps = row_of(world_, "async_next_step_copies", "ms");
    bench::Row memory = row_of(world_, "peak-memory/async_copies", "MB");
    for (int i = 0; i < repeats_; ++i) {
      clean();
      steps.limit.push_back(milliseconds(world_, [&] { optimizer_->step(); }));
      const tessera::StateDict now = state(false);
      memory.ours.push_back(extra_megabytes([&] {
        ckpt::AsyncSave saving;
        stalls.ours.push_back(milliseconds(
            world_, [&] { saving = ckpt::async_save(now, folder_ / "p"); }));
        steps.ours.push_back(milliseconds(world_, [&] { optimizer_->step(); }));
        saving.wait();
      }));
    }
    print_on_rank_0(world_, {stalls, steps, memory});
  }

  /// Compared with the same tensors without the comparison between ranks.
  void measure_comparison() {
    bench::Row saves = row_of(world_, "save_copies", "ms");
    for (int i = 0; i < 2 * repeats_; ++i) {
      const bool compares = i % 2 == 0;
      const tessera::StateDict now = state(!compares);
      clean();
      (compares ? saves.ours : saves.limit).push_back(milliseconds(world_, [&] {
        ckpt::save(now, folder_ / "p");
      }));
    }
    print_on_rank_0(world_, {saves});
    clean();
  }

 private:
  static constexpr int kTensors = 41; // 1.03 GB

  tessera::StateDict state(bool of_any_rank) const {
    tessera::StateDict result;
    const auto add = [&](const std::string& name, const torch::Tensor& tensor) {
      result.set(
          name,
          of_any_rank ? tessera::StateValue::of_any_rank(tensor)
                      : tessera::StateValue(tensor));
    };
    const auto optim = tessera::optim::state_dict(*optimizer_);
    for (int i = 0; i < kTensors; ++i) {
      const std::string name = std::to_string(i);
      add(name, params_[static_cast<size_t>(i)].detach());
      const auto& moments = optim.at("state").dict().at(i).dict();
      add(name + ".exp_avg", moments.at("exp_avg").tensor());
      add(name + ".exp_avg_sq", moments.at("exp_avg_sq").tensor());
    }
    return result;
  }

  void clean() const {
    world_.barrier();
    if (world_.rank() == 0) {
      fs::remove_all(folder_ / "p");
      ::sync();
    }
    world_.barrier();
  }

  const int repeats_;
  const tessera::Group world_;
  const fs::path folder_;
  std::vector<torch::Tensor> params_;
  std::unique_ptr<torch::optim::AdamW> optimizer_;
};

} // namespace

int main(int argc, char** argv) {
  const Arguments arguments(argc, argv);
  const std::string folder = arguments.word(0, "");
  if (folder.empty()) {
    std::fprintf(stderr, "usage: checkpoint_bench FOLDER [load_world1]\n");
    return 2;
  }
  const auto world = tessera::init();
  if (arguments.word(1, "") == "load_world1") {
    load_world1(arguments, world, folder);
  } else {
    Saves saves(arguments, world, folder);
    saves.measure_calls();
    saves.measure_async();
    saves.keep();
    Copies copies(arguments, world, folder);
    copies.measure_async();
    copies.measure_comparison();
  }
  return 0;
}
