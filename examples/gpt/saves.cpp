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
      state_(parallel.model(), {parallel.optimizer()}),
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

std::optional<Place> Saves::load(From from) {
  state_.values = {{"step", 0}, {"windows_seen", 0}};
  if (from == From::Best) {
    const auto step = step_of_best();
    if (!step) {
      return std::nullopt;
    }
    checkpoints_.load(*step, state_);
    complete_ = *step;
  } else {
    complete_ = checkpoints_.load_latest(state_);
  }
  if (!complete_) {
    return std::nullopt;
  }
  return Place{
      .step = state_.values.at("step").to_int(),
      .windows_seen = state_.values.at("windows_seen").to_int()};
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
  for (const auto& parameter : tessera::parameters(parallel_.model())) {
    if (!torch::isfinite(parameter.detach().sum()).item<bool>()) {
      is_finite.zero_();
    }
  }
  world_.all_reduce(is_finite, tessera::ReduceOp::Min, "finite parameters");
  return is_finite.item<double>() > 0;
}

void Saves::save(const Place& place, std::optional<double> best_loss) {
  if (!has_finite_parameters()) {
    throw std::runtime_error(
        "parameters are not finite after step " + std::to_string(place.step) +
        ", so they are not saved. Resume with a lower --lr or a longer "
        "--warmup.");
  }
  const auto start = Clock::now();
  checkpoints_.wait(); // waits for the previous save; throws if that failed
  note_saved();
  if (best_loss) {
    best_ = {.step = place.step, .loss = *best_loss};
    on_rank_0([&] { best_file_.announce(best_); });
  }
  state_.values = {{"step", place.step}, {"windows_seen", place.windows_seen}};
  if (settings_.wait_for_saves) {
    checkpoints_.save(place.step, state_);
  } else {
    checkpoints_.async_save(place.step, state_);
  }
  newest_ = Save{
      .step = place.step,
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
