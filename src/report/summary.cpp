#include "report/summary.h"

#include <algorithm>
#include <cmath>

#include "report/report_text.h"

namespace tessera::report {
namespace {

void take_losses(const Run& run, Summary* summary) {
  for (const Step& step : run.steps) {
    if ((step.has & Step::kLoss) == 0) {
      continue;
    }
    if (!summary->first_loss) {
      summary->first_loss = step.loss;
    }
    summary->final_loss = step.loss;
    summary->final_loss_step = step.step;
  }
  if (!run.evals.empty()) {
    summary->last_eval = run.evals.back();
  }
  for (const Eval& eval : run.evals) {
    if (std::isfinite(eval.loss) &&
        (!summary->best_eval || eval.loss < summary->best_eval->loss)) {
      summary->best_eval = eval;
    }
  }
}

std::optional<double> median(std::vector<double> values) {
  if (values.empty()) {
    return std::nullopt;
  }
  const auto middle = values.begin() + values.size() / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

void take_speed_and_memory(const Run& run, Summary* summary) {
  std::vector<double> rates;
  for (const Step& step : run.steps) {
    summary->tokens += step.tokens;
    if ((step.has & Step::kTokens) != 0 && step.seconds > 0) {
      rates.push_back(step.tokens / step.seconds);
    }
    const double bytes = step.memory_total();
    if ((step.has & Step::kMemory) != 0 &&
        bytes > summary->peak_memory_bytes.value_or(-1)) {
      summary->peak_memory_bytes = bytes;
      summary->peak_memory_step = step.step;
    }
  }
  summary->median_tokens_per_second = median(std::move(rates));
}

std::string worlds_text(const Summary& summary) {
  constexpr size_t kMost = 4;
  const size_t left_out =
      summary.worlds.size() - std::min(summary.worlds.size(), kMost);
  std::string text = left_out > 0 ? "..." : "";
  for (size_t i = left_out; i < summary.worlds.size(); ++i) {
    text += (text.empty() ? "" : ", then ") + std::to_string(summary.worlds[i]);
  }
  return text.empty() ? "an unknown number of ranks"
                      : text + (text == "1" ? " rank" : " ranks");
}

std::string loss_text(const Summary& summary) {
  std::string text = "no losses in the log";
  if (summary.final_loss) {
    text = "loss " + number_text(*summary.final_loss) + " at step " +
        count_text(summary.final_loss_step) + ", from " +
        number_text(*summary.first_loss);
  }
  if (summary.best_eval) {
    text += "; best eval loss " + number_text(summary.best_eval->loss) +
        " at step " + count_text(summary.best_eval->step);
  }
  if (summary.num_skipped > 0) {
    text += "; " + count_text(summary.num_skipped, "step") +
        " skipped, whose gradients overflowed";
  }
  return text;
}

std::string speed_text(const Summary& summary) {
  std::string text = summary.tokens > 0
      ? count_text(summary.tokens, "token") + " in "
      : "no tokens in the log; ran for ";
  text += duration_text(summary.seconds);
  if (summary.median_tokens_per_second) {
    text += ", " + count_text(*summary.median_tokens_per_second) +
        " a second (median)";
  }
  return text;
}

std::string memory_text(const Summary& summary) {
  if (!summary.peak_memory_bytes) {
    return "no memory in the log";
  }
  return "memory " + bytes_text(*summary.peak_memory_bytes) +
      " per rank at its peak, step " + count_text(summary.peak_memory_step);
}

std::string checkpoints_text(const Run& run, const Summary& summary) {
  std::string text = count_text(run.checkpoints.size(), "checkpoint");
  if (!run.checkpoints.empty()) {
    text += ", the last at step " + count_text(run.checkpoints.back().step);
  }
  const auto num_continued = static_cast<size_t>(std::count_if(
      run.attempts.begin(), run.attempts.end(), [](const Attempt& attempt) {
        return attempt.is_continuation;
      }));
  text += "; " + count_text(run.attempts.size() - 1 - num_continued, "restart");
  if (num_continued > 0) {
    text += ", continued " + count_text(num_continued, "time");
  }
  if (summary.num_repeated > 0) {
    text += ", " + count_text(summary.num_repeated, "step") + " run again";
  }
  return text;
}

} // namespace

Summary summarize(const Run& run) {
  Summary summary;
  summary.state = run.attempts.back().end_reason.value_or("no end");
  summary.num_steps = static_cast<int64_t>(run.steps.size());
  summary.last_step = run.steps.empty() ? run.attempts.back().start_step
                                        : run.steps.back().step;
  summary.num_skipped =
      std::count_if(run.steps.begin(), run.steps.end(), [](const Step& step) {
        return step.is_skipped;
      });
  for (const Superseded& part : run.superseded) {
    summary.num_repeated += static_cast<int64_t>(part.steps.size());
  }
  take_losses(run, &summary);
  take_speed_and_memory(run, &summary);
  for (const Attempt& attempt : run.attempts) {
    summary.seconds += attempt.seconds();
    if (attempt.world > 0 &&
        (summary.worlds.empty() || summary.worlds.back() != attempt.world)) {
      summary.worlds.push_back(attempt.world);
    }
  }
  return summary;
}

std::string summary_text(const Run& run) {
  const std::string& name = run.attempts.back().name;
  return summary_text(run, name.empty() ? "run" : name);
}

std::string summary_text(const Run& run, const std::string& name) {
  const Summary summary = summarize(run);
  std::string text = printable(name) + ": " + printable(summary.state) +
      (run.attempts.back().end_reason ? "" : " (killed, or still running)") +
      " after step " + count_text(summary.last_step) + ", on " +
      worlds_text(summary) + "\n";
  if (!run.attempts.back().error.empty()) {
    text += "  " + printable(run.attempts.back().error) + "\n";
  }
  for (const std::string& line :
       {loss_text(summary),
        speed_text(summary),
        memory_text(summary),
        checkpoints_text(run, summary)}) {
    text += "  " + line + "\n";
  }
  return text;
}

std::string problems_text(const Run& run) {
  if (run.num_problems == 0) {
    return {};
  }
  std::string text = std::to_string(run.num_problems) + " of " +
      count_text(run.num_lines, "line") + " could not be read:\n";
  for (const Problem& problem : run.problems) {
    text +=
        "  line " + std::to_string(problem.line) + " " + problem.what + "\n";
  }
  if (run.num_problems > static_cast<int64_t>(run.problems.size())) {
    text += "  and more\n";
  }
  return text;
}

} // namespace tessera::report
