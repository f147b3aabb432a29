// A run in a few numbers: for each tile a key, a title, the value and what is to be said of it.

function validationTile({ last_eval: last, best_eval: best }) {
  const title = "Validation loss";
  if (!last) return ["validation_loss", title, "none", "no evaluation in the log"];
  const isBest = best && best.step === last.step;
  const more = isBest ? ", its best" : best ? `; best ${number(best.loss)} at step ${count(best.step)}` : "";
  return ["validation_loss", title, number(last.loss), `at step ${count(last.step)}${more}`];
}

function tilesOf({ summary, num_attempts: attempts }) {
  return [
    validationTile(summary),
    ["final_loss", "Training loss", summary.final_loss === null ? "none" : number(summary.final_loss),
      summary.final_loss === null ? "none in the log"
        : `at step ${count(summary.final_loss_step)}, from ${number(summary.first_loss)}`],
    ["steps", "Steps", count(summary.last_step),
      (summary.num_repeated ? `${count(summary.num_repeated)} of them run again` : `${count(summary.num_steps)} in the log`) +
        (summary.num_skipped ? `, ${count(summary.num_skipped)} skipped` : "")],
    ["tokens", "Tokens", summary.tokens ? short(summary.tokens) : "?",
      summary.tokens ? `${count(summary.tokens)} in all` : "none in the log"],
    ["time", "Time", duration(summary.seconds), attempts > 1 ? `in ${plural(attempts, "attempt")}` : "in one attempt"],
    ["tokens_per_second", "Tokens per second", summary.tokens_per_second === null ? "?" : short(summary.tokens_per_second),
      summary.tokens_per_second === null ? "none in the log" : "median of the steps"],
    ["world", "Ranks", (summary.num_worlds > 4 ? "… → " : "") + summary.worlds.slice(-4).join(" → ") || "?",
      summary.num_worlds > 1 ? "as it was resumed" : "world size"],
    ["peak_memory", "Peak memory", summary.peak_memory_bytes === null ? "?" : bytes(summary.peak_memory_bytes),
      summary.peak_memory_bytes === null ? "none in the log" : `per rank, at step ${count(summary.peak_memory_step)}`],
  ];
}

function showState(pill, { state }) {
  pill.textContent = state;
  pill.classList.toggle("finished", state === "finished");
}

function showProblems(box, contents) {
  if (!contents.length) return;
  box.hidden = false;
  box.append(...contents.flat());
}
