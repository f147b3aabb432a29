#include "best.h"

#include <nlohmann/json.hpp>

#include <charconv>
#include <cstdio>
#include <fstream>
#include <stdexcept>
#include <system_error>

namespace gpt {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::string_view kStepPrefix = "step_";

[[noreturn]] void fail(const fs::path& path, const std::error_code& error) {
  throw std::runtime_error(
      "cannot write \"" + path.string() + "\": " + error.message() + ".");
}

std::vector<Candidate> read_candidates(const fs::path& path) {
  std::ifstream file(path);
  const auto list = json::parse(file, nullptr, /*allow_exceptions=*/false);
  std::vector<Candidate> candidates;
  if (!list.is_array()) {
    return candidates;
  }
  for (const auto& entry : list) {
    if (entry.is_object() && entry.contains("step") &&
        entry.contains("validation_loss") &&
        entry.at("step").is_number_integer() &&
        entry.at("validation_loss").is_number()) {
      candidates.push_back(
          {.step = entry.at("step"), .loss = entry.at("validation_loss")});
    }
  }
  return candidates;
}

} // namespace

std::optional<int64_t> step_of(const fs::path& checkpoint) {
  const auto name = checkpoint.filename().string();
  if (!name.starts_with(kStepPrefix)) {
    return std::nullopt;
  }
  int64_t step = 0;
  const char* end = name.data() + name.size();
  const auto [stop, error] =
      std::from_chars(name.data() + kStepPrefix.size(), end, step);
  return error == std::errc() && stop == end ? std::optional(step)
                                             : std::nullopt;
}

std::optional<Candidate> BestFile::open(
    int64_t last,
    const std::function<bool(int64_t)>& is_there) {
  candidates_ = read_candidates(run_ / "best.json");
  std::erase_if(candidates_, [&](const Candidate& candidate) {
    return candidate.step > last || !is_there(candidate.step);
  });
  found_ = std::nullopt;
  for (const Candidate& candidate : candidates_) {
    if (!found_ || candidate.loss < found_->loss) {
      found_ = candidate;
    }
  }
  const auto named = read(run_);
  const auto named_step = named ? step_of(*named) : std::nullopt;
  if (!found_ && named_step && *named_step <= last && is_there(*named_step)) {
    found_ = Candidate{.step = *named_step};
  }
  return found_;
}

void BestFile::repair() {
  write_candidates();
  const auto named = read(run_);
  if (!found_) {
    if (named) {
      std::error_code ignored; // --from best will report it
      fs::remove(run_ / "best", ignored);
    }
    return;
  }
  if (!named || step_of(*named) != found_->step) {
    char name[32];
    std::snprintf(name, sizeof(name), "step_%08ld", found_->step);
    point_to(run_ / "checkpoints" / name);
  }
}

void BestFile::announce(const Candidate& candidate) {
  candidates_.push_back(candidate);
  write_candidates();
}

void BestFile::write_candidates() {
  json list = json::array();
  for (const Candidate& candidate : candidates_) {
    list.push_back(
        {{"step", candidate.step}, {"validation_loss", candidate.loss}});
  }
  const fs::path path = run_ / "best.json";
  const fs::path beside = path.string() + ".partial";
  std::ofstream file(beside);
  file << list.dump(1) << "\n";
  file.close();
  std::error_code error;
  if (!file) {
    fail(beside, std::make_error_code(std::errc::io_error));
  }
  fs::rename(beside, path, error);
  if (error) {
    fail(path, error);
  }
}

void BestFile::point_to(const fs::path& path) {
  const fs::path beside = run_ / ".best.partial";
  std::error_code error;
  fs::remove(beside, error);
  // Relative, so that the run can be moved.
  fs::create_directory_symlink(
      fs::path("checkpoints") / path.filename(), beside, error);
  if (error) {
    fail(beside, error);
  }
  fs::rename(beside, run_ / "best", error);
  if (error) {
    fail(run_ / "best", error);
  }
}

std::optional<fs::path> BestFile::read(const fs::path& run) {
  std::error_code error;
  const auto target = fs::read_symlink(run / "best", error);
  return error ? std::nullopt : std::optional(run / target);
}

} // namespace gpt
