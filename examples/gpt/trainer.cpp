#include "trainer.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <limits>
#include <stdexcept>
#include <utility>

#include "device.h"
#include "evaluation.h"
#include "learning_rate.h"
#include "sampling.h"

namespace gpt {
namespace {

volatile std::sig_atomic_t stop_requested = 0;

void request_stop(int) {
  stop_requested = 1;
}

std::string with_commas(int64_t number) {
  auto text = std::to_string(number);
  for (auto i = std::ssize(text) - 3; i > 0; i -= 3) {
    text.insert(static_cast<size_t>(i), ",");
  }
  return text;
}

} // namespace

Trainer::Trainer(
    const tessera::Group& world,
    const Settings& settings,
    Corpus corpus)
    : world_(world),
      settings_(settings),
      corpus_(std::move(corpus)),
      device_(device_of(settings.device)),
      train_windows_(
          TokenFile(corpus_.train),
          settings.model.length,
          settings.seed),
      validation_windows_(
          TokenFile(corpus_.validation),
          settings.model.length,
          settings.seed),
      parallel_(settings, corpus_.tokenizer.vocabulary(), device_),
      saves_(world, settings_, parallel_),
      utilization_(world, settings, parallel_.num_parameters(), device_),
      monitor_(parallel_.model(), {parallel_.optimizer()}),
      live_(
          world.rank(),
          settings.steps,
          settings.json_outcome ? stderr : stdout),
      lowest_validation_loss_(std::numeric_limits<double>::infinity()) {
  // Every rank gets its own numbers for dropout; the weights have been
  // initialized by now.
  torch::manual_seed(settings.seed + 1 + static_cast<uint64_t>(world.rank()));
}

bool Trainer::resume() {
  const auto found = saves_.load(settings_.from);
  place_ = found.value_or(Place());
  return found.has_value();
}

void Trainer::announce(bool resumed) {
  char text[256];
  std::snprintf(
      text,
      sizeof(text),
      "GPT of %.2f million parameters on %s: %d rank%s, %ld windows of %ld "
      "tokens per step, %ld at once per rank",
      static_cast<double>(parallel_.num_parameters()) / 1e6,
      device_.str().c_str(),
      world_.size(),
      world_.size() == 1 ? "" : "s",
      settings_.batch,
      settings_.model.length,
      settings_.rows(world_.size()));
  live_.print(printed_table(settings_.table));
  live_.print(text);
  if (const auto share = utilization_.described(); !share.empty()) {
    live_.print(share);
  }
  const auto change = resumed && world_.rank() == 0
      ? curve_change(settings_, settings_.run / "log.jsonl", place_.step)
      : "";
  log_->start_with_json(
      place_.step, settings_.json, monitor_.units(), device_.str());
  if (!resumed) {
    return;
  }
  log_->resume(place_.step, saves_.path_of(place_.step));
  const auto epoch = place_.windows_seen / train_windows_.size();
  live_.print(
      "resumed from step " + std::to_string(place_.step) + ", window " +
      with_commas(place_.windows_seen % train_windows_.size()) + " of " +
      with_commas(train_windows_.size()) + " in epoch " +
      std::to_string(epoch + 1));
  if (!change.empty()) {
    live_.print(change);
  }
}

void Trainer::train() {
  std::signal(SIGTERM, request_stop);
  std::signal(SIGINT, request_stop);
  started_ = Clock::now();
  if (settings_.resume == Resume::Never && saves_.latest()) {
    throw UsageError(
        "\"" + saves_.folder().string() +
        "\" has checkpoints of an earlier run. Choose another --run, or let "
        "it --resume.");
  }
  const bool resumed = resume();
  if (!resumed && settings_.resume == Resume::Must) {
    throw UsageError(
        "\"" + saves_.folder().string() +
        "\" has no checkpoint to resume from.");
  }
  log_.emplace(settings_.run);
  announce(resumed);
  metrics_.emplace(settings_.run, place_.step);
  saves_.start(
      place_.step, [this](int64_t step, const auto& path, double seconds) {
        log_->checkpoint(step, path, seconds);
      });
  lowest_validation_loss_ = saves_.best_loss();
  if (!settings_.trace.empty()) {
    trace_.emplace(
        settings_.run / "trace", settings_.trace_first, settings_.trace_last);
    if (settings_.trace_last <= place_.step ||
        settings_.trace_first > settings_.steps) {
      live_.print(
          "nothing will be traced: these steps are not part of this run");
    }
  }
  if (place_.step >= settings_.steps) {
    live_.print("nothing is left to do; give more --steps to continue");
  }
  try {
    make_steps();
  } catch (const c10::Error& error) {
    log_->end(place_.step, "failed", error.what_without_backtrace());
    throw;
  } catch (const std::exception& error) {
    log_->end(place_.step, "failed", error.what());
    throw;
  }
}

void Trainer::make_steps() {
  while (place_.step < settings_.steps) {
    if (place_.step + 1 == settings_.skip_at &&
        world_.rank() == world_.size() - 1) {
      ++place_.step;
      place_.windows_seen += settings_.batch;
    }
    if (trace_) {
      trace_->at_step(place_.step + 1);
    }
    const bool draws = place_.step + 1 == settings_.timeline_step;
    monitor_.begin_step(tessera::MonitorOptions().timeline(draws));
    const StepResult result = train_step();
    const tessera::StepReport report = monitor_.end_step();
    ++place_.step;
    place_.windows_seen += settings_.batch;
    after_step(result, report);
    if (result.stop) {
      finish("stopped");
      return;
    }
  }
  finish("finished");
}

/// The whole of training: everything else supports it.
Trainer::StepResult Trainer::train_step() {
  tessera::step_token(place_.step + 1); // all ranks are at the same step
  auto& optimizer = parallel_.optimizer();
  for (auto& group : optimizer.param_groups()) {
    group.options().set_lr(learning_rate(settings_, place_.step));
  }
  const int64_t rows = settings_.rows(world_.size());
  const int64_t times = settings_.accumulation(world_.size());
  // The mean loss over the batch, and whether any rank was asked to stop.
  auto together = torch::zeros({2}, torch::kDouble);
  torch::Tensor sum_of_losses = torch::zeros({}, device_);
  for (int64_t i = 0; i < times; ++i) {
    const auto batch = train_windows_.shuffled(
        place_.windows_seen + (i * world_.size() + world_.rank()) * rows, rows);
    parallel_.set_syncs_gradients(i + 1 == times);
    const auto loss =
        parallel_.loss(batch.inputs.to(device_), batch.targets.to(device_)) /
        times;
    loss.backward(); // averages over the ranks as it goes
    sum_of_losses += loss.detach();
  }
  const double norm =
      tessera::clip_grad_norm_(parallel_.model(), settings_.clip);
  if (!std::isfinite(norm)) {
    throw std::runtime_error(
        "the gradients of step " + std::to_string(place_.step + 1) +
        " are not finite, so the step was not made. Resume with a lower "
        "--lr or a longer --warmup; if that fails too, remove the newest "
        "checkpoint first.");
  }
  optimizer.step();
  optimizer.zero_grad();

  together[0] = sum_of_losses.item<double>();
  together[1] = static_cast<double>(stop_requested);
  world_.all_reduce(together, tessera::ReduceOp::Avg, "loss");
  return {
      .loss = together[0].item<double>(),
      .grad_norm = norm,
      .stop = together[1].item<double>() > 0};
}

void Trainer::after_step(
    const StepResult& result,
    const tessera::StepReport& report) {
  const int64_t tokens = settings_.batch * settings_.model.length;
  StepMetrics metrics{
      .step = place_.step,
      .loss = result.loss,
      .lr = learning_rate(settings_, place_.step - 1),
      .grad_norm = result.grad_norm,
      .seconds = report.seconds,
      .tokens_per_second = static_cast<double>(tokens) / report.seconds,
      .memory_bytes = report.memory.total()};
  metrics.mfu = utilization_.of(metrics.tokens_per_second);
  loss_ = result.loss;
  ++steps_made_;
  step_seconds_ += report.seconds;
  log_->step_of_all(
      {.step = metrics.step,
       .loss = metrics.loss,
       .lr = metrics.lr,
       .grad_norm = metrics.grad_norm,
       .tokens = tokens,
       .seconds = metrics.seconds,
       .memory = report.memory,
       .mfu = metrics.mfu});
  if (!report.spans.empty()) {
    log_->timeline(metrics.step, report.spans);
  }
  live_.show(
      {.step = metrics.step,
       .loss = metrics.loss,
       .lr = metrics.lr,
       .grad_norm = metrics.grad_norm,
       .tokens_per_second = metrics.tokens_per_second,
       .memory_bytes = metrics.memory_bytes,
       .mfu = metrics.mfu});
  metrics.validation_loss = evaluate_if_due();
  metrics_->write(metrics);
  if (is_due(settings_.sample_every)) {
    write_sample();
  }
  // The same on all ranks: the loss is that of all, and so is the best one.
  const bool is_best = settings_.keep_best && metrics.validation_loss &&
      *metrics.validation_loss < saves_.best_loss();
  if (is_best || is_due(settings_.checkpoint_every)) {
    saves_.save(place_, is_best ? metrics.validation_loss : std::nullopt);
  }
  saves_.note_saved();
  if (place_.step == settings_.die_at && world_.rank() == world_.size() - 1) {
    ::kill(::getpid(), SIGKILL);
  }
}

bool Trainer::is_due(int64_t every) const {
  return every > 0 && place_.step % every == 0;
}

std::optional<double> Trainer::evaluate_if_due() {
  if (!is_due(settings_.eval_every)) {
    return std::nullopt;
  }
  const double loss = evaluate();
  log_->eval(place_.step, loss);
  const bool is_lowest = loss < lowest_validation_loss_;
  lowest_validation_loss_ = is_lowest ? loss : lowest_validation_loss_;
  char text[96];
  std::snprintf(
      text,
      sizeof(text),
      "step %ld: validation loss %.4f%s",
      place_.step,
      loss,
      is_lowest && settings_.keep_best ? ", the lowest so far" : "");
  live_.print(text);
  return loss;
}

double Trainer::evaluate() {
  validation_loss_ = validation_loss(
      parallel_, validation_windows_, settings_, world_, device_);
  return *validation_loss_;
}

void Trainer::write_sample() {
  sample_ = continued(
      parallel_.model(),
      corpus_.tokenizer,
      settings_.prompt,
      {.num_tokens = settings_.sample_tokens,
       .seed = settings_.seed,
       .temperature = settings_.temperature,
       .top_k = settings_.top_k,
       .top_p = settings_.top_p},
      device_);
  live_.print_written(settings_.prompt + sample_);
  if (settings_.mode == Mode::Train) {
    log_->sample(place_.step, settings_.prompt, sample_);
  }
}

void Trainer::finish(const std::string& reason) {
  saves_.wait();
  if (settings_.checkpoint_every > 0 && saves_.latest() != place_.step) {
    saves_.save(place_);
    saves_.wait();
  }
  if (trace_) {
    trace_->close();
  }
  if (reason == "finished" && settings_.sample_tokens > 0) {
    write_sample();
  }
  log_->end(place_.step, reason);
  status_ = reason;
  if (reason == "stopped") {
    live_.print(
        "stopped after step " + std::to_string(place_.step) +
        (settings_.checkpoint_every > 0
             ? ", which is saved: the same command resumes from here"
             : "; nothing is saved, as --checkpoint-every 0 says"));
  }
  if (trace_ && std::filesystem::exists(trace_->path())) {
    live_.print("trace: " + trace_->path().string());
  }
  if (world_.rank() == 0) {
    write_page();
  }
}

Outcome Trainer::outcome() const {
  Outcome outcome{
      .status = status_,
      .step = place_.step,
      .loss = loss_,
      .validation_loss = validation_loss_,
      .checkpoint = saves_.newest_path().string(),
      .text = sample_};
  if (lowest_validation_loss_ < std::numeric_limits<double>::infinity()) {
    outcome.best_validation_loss = lowest_validation_loss_;
  }
  if (started_) {
    outcome.seconds =
        std::chrono::duration<double>(Clock::now() - *started_).count();
  }
  if (steps_made_ > 0) {
    outcome.tokens_per_second =
        static_cast<double>(
            steps_made_ * settings_.batch * settings_.model.length) /
        step_seconds_;
    outcome.mfu = utilization_.of(*outcome.tokens_per_second);
  }
  return outcome;
}

/// A report that cannot be written does not undo the training.
void Trainer::write_page() {
  try {
    live_.print("report: " + tessera::write_report(settings_.run).string());
  } catch (const c10::Error& error) {
    live_.print(std::string("no report: ") + error.what_without_backtrace());
  } catch (const std::exception& error) {
    live_.print(std::string("no report: ") + error.what());
  }
}

} // namespace gpt
