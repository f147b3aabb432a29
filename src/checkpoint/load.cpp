#include <tessera/checkpoint/checkpoint.h>
#include <tessera/comm/agree.h>
#include <tessera/error.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "checkpoint/disk/input.h"
#include "checkpoint/disk/source.h"
#include "checkpoint/load_job.h"
#include "checkpoint/peers.h"
#include "checkpoint/state_leaves.h"
#include "checkpoint/values.h"

namespace tessera::checkpoint {

namespace {

/// Turns errors of files into the library's errors.
template <class F>
auto translated(F body) {
  try {
    return body();
  } catch (const AccessError& error) {
    raise<CheckpointAccessError>({.call = "load"}, error.what());
  } catch (const FileError& error) {
    raise<CheckpointError>({.call = "load"}, error.what());
  }
}

/// A digest of bytes here and there in a file that has no checksums: what
/// other programs write. Files of equal sizes and other weights differ in it.
uint64_t digest_of_samples(const Source& source, size_t file) {
  constexpr uint64_t kSample = 4096;
  constexpr uint64_t kMostSamples = 1024; // of all files
  const auto samples = std::max<uint64_t>(
      2, kMostSamples / std::max<size_t>(source.files().size(), 1));
  const SourceFile& known = source.files()[file];
  const uint64_t step =
      std::max(kSample, known.bytes / samples / kSample * kSample);
  const UniqueFd open = source.open_file(file);
  std::vector<uint8_t> bytes;
  for (uint64_t begin = 0; begin < known.bytes; begin += step) {
    const uint64_t count = std::min(kSample, known.bytes - begin);
    bytes.resize(bytes.size() + count);
    read_at(
        open, known.path, begin, bytes.data() + bytes.size() - count, count);
  }
  return checksum(bytes);
}

/// What all ranks must see alike. If a checkpoint is being replaced, or each
/// host has a folder of its own, ranks see different things.
std::vector<std::string> summary(const Source& source) {
  std::string all;
  for (const StoredTensor& tensor : source.tensors()) {
    all += tensor.name;
    for (const int64_t size : tensor.sizes) {
      all += fmt::format(" {}", size);
    }
  }
  for (const SourceFile& file : source.files()) {
    all += fmt::format("{} {}", file.name, file.bytes);
  }
  if (source.checksums() != nullptr) {
    for (const auto& [name, sums] : source.checksums()->files) {
      all += fmt::format("{} {:x}", name, fmt::join(sums.blocks, " "));
    }
  } else {
    for (size_t file = 0; file < source.files().size(); ++file) {
      all += fmt::format(" {:x}", digest_of_samples(source, file));
    }
  }
  return {fmt::format(
      "{} {}: {} tensors, {} values, {:016x}",
      name_of(source.format()),
      source.path().filename().string(),
      source.tensors().size(),
      source.values().size(),
      checksum(format::as_bytes(all)))};
}

/// `check`, if there is one, sees the target with its new values before tensors
/// are filled.
LoadReport load_checked(
    StateDict& target,
    const std::filesystem::path& path,
    const LoadOptions& options,
    LeftOutParts left_out,
    const std::function<void()>& check) {
  at::NoGradGuard no_grad;
  const Peers peers(options.group());
  const int num_threads =
      options.threads() > 0 ? options.threads() : peers.cores_each(4);
  std::unique_ptr<Source> source;
  settle(
      peers, [&] { source = translated([&] { return Source::open(path); }); });
  if (peers.size() > 1) {
    std::vector<std::string> seen;
    settle(peers, [&] { seen = translated([&] { return summary(*source); }); });
    agree(*peers.group(), "load", seen);
  }
  std::unique_ptr<LoadJob> job;
  settle(peers, [&] {
    job = translated([&] {
      return std::make_unique<LoadJob>(
          *source, target, options, left_out, num_threads);
    });
  });
  if (options.verify() == Verify::First) {
    settle(peers, [&] { translated([&] { job->verify(); }); });
  }
  if (check) {
    job->replace_values();
    settle(peers, check);
  }
  settle(peers, [&] {
    try {
      job->read();
    } catch (const FileError& error) {
      raise<CheckpointError>(
          {.call = "load"},
          fmt::format(
              "{} Some tensors of the target have been loaded already, on some ranks: load another checkpoint before you continue.",
              error.what()));
    }
  });
  job->replace_values();
  return job->report();
}

} // namespace

LoadReport load(
    StateDict& target,
    const std::filesystem::path& path,
    const LoadOptions& options) {
  return load_checked(target, path, options, LeftOutParts::Allowed, nullptr);
}

LoadReport load(
    Stateful& target,
    const std::filesystem::path& path,
    const LoadOptions& options) {
  StateDict state = target.state_dict();
  LoadOptions with_optional = options;
  with_optional.optional([&](const std::string& name) {
    return target.is_optional(name) ||
        (options.optional() && options.optional()(name));
  });
  LoadReport report =
      load_checked(state, path, with_optional, LeftOutParts::Refused, [&] {
        target.check_state_dict(state);
      });
  target.load_state_dict(state);
  return report;
}

StateDict read(
    const std::filesystem::path& path,
    const std::function<bool(const std::string&)>& filter) {
  at::NoGradGuard no_grad;
  return translated([&] {
    const auto source = Source::open(path);
    std::vector<std::vector<format::DcpPath::Key>> keys;
    std::vector<StateValue> values;
    const auto is_wanted = [&](const std::string& name) {
      return !filter || filter(name);
    };
    for (const StoredTensor& tensor : source->tensors()) {
      if (is_wanted(tensor.name)) {
        keys.push_back(tensor.keys);
        values.emplace_back(at::empty(tensor.sizes, from_format(tensor.dtype)));
      }
    }
    for (const StoredValue& value : source->values()) {
      if (is_wanted(value.name)) {
        keys.push_back(value.keys);
        values.emplace_back(from_format(source->value(value), value.name));
      }
    }
    StateDict state = assemble(keys, std::move(values));
    LoadJob job(
        *source,
        state,
        LoadOptions().strict(false),
        LeftOutParts::Allowed,
        /*num_threads=*/1);
    job.read();
    return state;
  });
}

} // namespace tessera::checkpoint
