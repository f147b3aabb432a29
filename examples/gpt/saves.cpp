#include "saves.h"

#include <chrono>
#include <cstring>
#include <span>
#include <stdexcept>
#include <utility>

namespace gpt {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

/// Checkpoints of earlier versions have it; --mode eval and sample take them.
/// These two need neither the place in the data nor the curve, and a run may
/// turn to float16 and back, with and without a scaler.
constexpr const char* kOldPlace = "values.windows_seen";

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// What rank 0 has, on every rank. Collective.
template <class Value>
Value of_rank_0(
    const tessera::Group& world,
    Value value,
    const std::string& what) {
  const std::span bytes(
      reinterpret_cast<const uint8_t*>(&value), sizeof(value));
  const auto heard = world.broadcast_bytes(bytes, 0, what);
  std::memcpy(&value, heard.data(), sizeof(value));
  return value;
}

} // namespace

Saves::Saves(
    const tessera::Group& world,
    const Settings& settings,
    Parallel& parallel)
    : world_(world),
      settings_(settings),
      parallel_(parallel),
      state_(parallel.module(), {parallel.optimizer()}),
      checkpoints_(
          settings.run / "checkpoints",
          tessera::checkpoint::ManagerOptions().keep_last(settings.keep)),
      best_file_(settings.run) {}

/// The step that RUN/best names on rank 0, on every rank.
std::optional<int64_t> Saves::step_of_best() const {
  int64_t step = -1;
  if (world_.rank() == 0) {
    const auto path = BestFile::read(settings_.run);
    step = path ? step_of(*path).value_or(-1) : -1;
  }
  step = of_rank_0(world_, step, "the best checkpoint");
  return step < 0 ? std::nullopt : std::optional(step);
}

std::optional<int64_t> Saves::load(From from) try {
  state_.values = {{"step", 0}};
  const auto options = tessera::checkpoint::LoadOptions().optional(
      [is_training = settings_.mode == Mode::Train](const std::string& name) {
        return name == kOldPlace || name.starts_with("scaler.") ||
            (!is_training &&
             (name.starts_with("data.") || name.starts_with("schedule.")));
      });
  if (from == From::Newest) {
    complete_ = checkpoints_.load_latest(state_, options);
  } else if (const auto step = step_of_best()) {
    checkpoints_.load(*step, state_, options);
    complete_ = step;
  }
  return complete_ ? std::optional(state_.values.at("step").to_int())
                   : std::nullopt;
} catch (const c10::ValueError& error) {
  const std::string text = error.what_without_backtrace();
  if (text.find("\"data.epoch\" is not in the checkpoint") == text.npos) {
    throw;
  }
  throw std::runtime_error(
      "the checkpoint in \"" + folder().string() +
      "\" was saved by an earlier version of this program, which did not save "
      "its place in the data and on the learning-rate curve as this one does. "
      "Train in another --run; --mode eval and --mode sample take the "
      "checkpoint as it is.");
}

void Saves::start(int64_t step, OnSaved on_saved) {
  on_saved_ = std::move(on_saved);
  if (!settings_.keep_best) { // what an earlier attempt kept stays
    checkpoints_.protect(step_of_best());
    return;
  }
  on_rank_0([&] {
    const auto entries = checkpoints_.list();
    const auto is_there = [&](int64_t wanted) {
      for (const auto& entry : entries) {
        if (entry.step == wanted) {
          return entry.problem.empty();
        }
      }
      return false;
    };
    best_ = best_file_.open(step, is_there).value_or(Candidate());
  });
  best_ = of_rank_0(world_, best_, "the best checkpoint so far");
  if (best_.step > 0) {
    checkpoints_.protect(best_.step);
  }
  on_rank_0([&] { best_file_.repair(); });
}

/// Which checkpoint is the best is worth a warning, and not the training.
void Saves::on_rank_0(const std::function<void()>& write) {
  if (world_.rank() != 0) {
    return;
  }
  try {
    write();
  } catch (const std::exception& error) {
    TORCH_WARN(error.what(), " RUN/best may not name the best checkpoint.");
  }
}

/// Checks all ranks.
bool Saves::has_finite_parameters() {
  auto is_finite = torch::ones({}, torch::kDouble);
  for (const auto& parameter : tessera::parameters(parallel_.module())) {
    if (!torch::isfinite(parameter.detach().sum()).item<bool>()) {
      is_finite.zero_();
    }
  }
  world_.all_reduce(is_finite, tessera::ReduceOp::Min, "finite parameters");
  return is_finite.item<double>() > 0;
}

void Saves::save(int64_t step, std::optional<double> best_loss) {
  if (!has_finite_parameters()) {
    throw std::runtime_error(
        "parameters are not finite after step " + std::to_string(step) +
        ", so they are not saved. Resume with a lower --lr or a longer "
        "--warmup.");
  }
  const auto start = Clock::now();
  checkpoints_.wait(); // waits for the previous save; throws if that failed
  note_saved();
  if (best_loss) {
    best_ = {.step = step, .loss = *best_loss};
    on_rank_0([&] { best_file_.announce(best_); });
  }
  state_.values = {{"step", step}};
  if (settings_.wait_for_saves) {
    checkpoints_.save(step, state_);
  } else {
    checkpoints_.async_save(step, state_);
  }
  newest_ = Save{
      .step = step,
      .blocked_seconds = seconds_since(start),
      .is_best = best_loss.has_value()};
}

void Saves::note_saved() {
  if (!newest_ || newest_->is_noted || checkpoints_.is_saving()) {
    return;
  }
  const auto path = checkpoints_.path_of(newest_->step);
  if (!fs::exists(path)) { // it failed: wait() will report it
    return;
  }
  newest_->is_noted = true;
  complete_ = newest_->step;
  if (newest_->is_best) {
    // The one before stays until RUN/best names this one.
    on_rank_0([&] { best_file_.point_to(path); });
    checkpoints_.protect(newest_->step);
  }
  if (world_.rank() == 0 && on_saved_) {
    on_saved_(newest_->step, path, newest_->blocked_seconds);
  }
}

void Saves::wait() {
  const auto start = Clock::now();
  checkpoints_.wait();
  if (newest_) {
    newest_->blocked_seconds += seconds_since(start);
  }
  note_saved();
}

fs::path Saves::newest_path() const {
  return complete_ ? checkpoints_.path_of(*complete_) : fs::path();
}

} // namespace gpt
