#include <tessera/comm/init.h>
#include <tessera/error.h>
#include <tessera/train/run_log.h>
#include <tessera/version.h>

#include <ATen/ops/empty.h>

#include <array>
#include <span>
#include <utility>

#include "base/byte_vector.h"
#include "train/log_file.h"
#include "train/log_json.h"
#include "train/origin.h"

namespace tessera {
namespace {

using train::host_name;
using train::Json;
using train::json_of;
using train::time_now;

constexpr int kFormat = 1;
/// The beginning of a line of a kind: "kind" is written first.
constexpr const char* kStartLine = R"({"kind":"start",)";

std::string last_part(const std::filesystem::path& folder) {
  const auto whole = std::filesystem::absolute(folder).lexically_normal();
  return (whole.has_filename() ? whole : whole.parent_path())
      .filename()
      .string();
}

Json line(const char* kind, int64_t step) {
  return {{"kind", kind}, {"time", time_now()}, {"step", step}};
}

/// The memory of the rank that has the most. Collective.
std::optional<MemoryByKind> largest(
    const std::optional<MemoryByKind>& mine,
    const Group& group) {
  const MemoryByKind memory = mine.value_or(MemoryByKind{.other = -1});
  const std::array<int64_t, 6> values{
      memory.shards,
      memory.full,
      memory.gradients,
      memory.optimizer,
      memory.activations,
      memory.other};
  constexpr int64_t kCount = values.size();
  const at::Tensor sent = at::empty({kCount}, at::kLong);
  std::copy(values.begin(), values.end(), sent.mutable_data_ptr<int64_t>());
  const at::Tensor all = at::empty({group.size(), kCount}, at::kLong);
  group.all_gather_into(all, sent, "memory by kind");
  MemoryByKind most{.other = -1};
  const int64_t* row = all.const_data_ptr<int64_t>();
  for (int rank = 0; rank < group.size(); ++rank, row += kCount) {
    const MemoryByKind one{row[0], row[1], row[2], row[3], row[4], row[5]};
    if (one.total() > most.total()) {
      most = one;
    }
  }
  return most.total() < 0 ? std::nullopt : std::optional(most);
}

} // namespace

struct RunLog::Impl {
  Impl(std::filesystem::path where, const RunLogOptions& options)
      : folder(std::move(where)),
        path(folder / "log.jsonl"),
        name(options.name().empty() ? last_part(folder) : options.name()) {
    if (options.group()) {
      group = *options.group();
    } else if (is_initialized()) {
      group = world();
    }
    if (rank() == 0) {
      attempt = train::LogFile::count_lines(path, kStartLine);
      file.emplace(path);
    }
  }

  int rank() const {
    return group.valid() ? group.rank() : 0;
  }
  int size() const {
    return group.valid() ? group.size() : 1;
  }

  void write(const Json& json) {
    if (file) {
      file->append(train::line_of(json));
    }
  }

  void write_start(
      int64_t step,
      Json config,
      const std::vector<UnitInfo>& units,
      const std::string& device) {
    write(
        {{"kind", "start"},
         {"time", time_now()},
         {"format", kFormat},
         {"attempt", attempt},
         {"step", step},
         {"world", size()},
         {"device", device},
         {"name", name},
         {"versions",
          {{"tessera", version()}, {"libtorch", libtorch_version()}}},
         {"host", host_name()},
         {"config", std::move(config)},
         {"units", json_of(units)}});
  }

  void write_step(
      const StepRecord& record,
      const std::optional<MemoryByKind>& memory) {
    Json json = line("step", record.step);
    const auto add = [&](const char* key, const std::optional<double>& value) {
      if (value) {
        json[key] = json_of(*value);
      }
    };
    add("loss", record.loss);
    add("lr", record.lr);
    add("grad_norm", record.grad_norm);
    if (record.tokens) {
      json["tokens"] = *record.tokens;
    }
    add("seconds", record.seconds);
    add("mfu", record.mfu);
    add("loss_scale", record.loss_scale);
    if (record.skipped) {
      json["skipped"] = true;
    }
    if (memory) {
      json["memory"] = json_of(*memory);
    }
    write(json);
  }

  /// A relative path, so that the folder can be moved.
  std::string shown(const std::filesystem::path& other) const {
    const auto inside =
        std::filesystem::absolute(other).lexically_normal().lexically_relative(
            std::filesystem::absolute(folder).lexically_normal());
    const bool is_inside = !inside.empty() && *inside.begin() != "..";
    return (is_inside ? inside : other).generic_string();
  }

  const std::filesystem::path folder;
  const std::filesystem::path path;
  const std::string name;
  Group group; // invalid if this process is alone
  int64_t attempt = 0;
  std::optional<train::LogFile> file; // on the rank that writes
};

RunLog::RunLog(std::filesystem::path folder, const RunLogOptions& options)
    : impl_(std::make_unique<Impl>(std::move(folder), options)) {}

RunLog::~RunLog() = default;

const std::filesystem::path& RunLog::path() const {
  return impl_->path;
}

int64_t RunLog::attempt() const {
  return impl_->attempt;
}

bool RunLog::is_writing() const {
  return impl_->file && impl_->file->is_open();
}

void RunLog::start(
    int64_t step,
    const StateDict& config,
    const std::vector<UnitInfo>& units,
    const std::string& device) {
  impl_->write_start(step, json_of(config), units, device);
}

void RunLog::start_with_json(
    int64_t step,
    std::string_view config,
    const std::vector<UnitInfo>& units,
    const std::string& device) {
  auto json = train::parse_json(config);
  if (!json) {
    raise<c10::ValueError>(
        {.call = "RunLog::start_with_json"},
        "the configuration is not JSON. Pass one JSON value, as text.");
  }
  impl_->write_start(step, std::move(*json), units, device);
}

void RunLog::resume(int64_t step, const std::filesystem::path& path) {
  Json json = line("resume", step);
  json["path"] = impl_->shown(path);
  impl_->write(json);
}

void RunLog::step(const StepRecord& record) {
  impl_->write_step(record, record.memory);
}

void RunLog::step_of_all(const StepRecord& record) {
  impl_->write_step(
      record,
      impl_->size() == 1 ? record.memory
                         : largest(record.memory, impl_->group));
}

void RunLog::eval(int64_t step, double loss) {
  Json json = line("eval", step);
  json["loss"] = json_of(loss);
  impl_->write(json);
}

void RunLog::sample(
    int64_t step,
    std::string_view prompt,
    std::string_view text) {
  Json json = line("sample", step);
  json["prompt"] = prompt;
  json["text"] = text;
  impl_->write(json);
}

void RunLog::checkpoint(
    int64_t step,
    const std::filesystem::path& path,
    double blocked_seconds) {
  Json json = line("checkpoint", step);
  json["path"] = impl_->shown(path);
  json["blocked_seconds"] = json_of(blocked_seconds);
  impl_->write(json);
}

void RunLog::timeline(int64_t step, const std::vector<TimelineSpan>& spans) {
  const std::string mine = train::line_of(json_of(spans));
  const auto* bytes = reinterpret_cast<const uint8_t*>(mine.data());
  std::vector<Bytes> all{Bytes(bytes, bytes + mine.size())};
  if (impl_->size() > 1) {
    all = impl_->group.gather_bytes(all.front(), 0, "timeline");
  }
  if (impl_->rank() != 0) {
    return;
  }
  Json json = line("timeline", step);
  json["ranks"] = Json::array();
  for (size_t rank = 0; rank < all.size(); ++rank) {
    json["ranks"].push_back(
        {{"rank", rank},
         {"spans", Json::parse(all[rank].begin(), all[rank].end())}});
  }
  impl_->write(json);
}

void RunLog::end(
    int64_t step,
    const std::string& reason,
    std::string_view error) {
  Json json = line("end", step);
  json["reason"] = reason;
  if (!error.empty()) {
    json["error"] = error;
  }
  impl_->write(json);
}

} // namespace tessera
