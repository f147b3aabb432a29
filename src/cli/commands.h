// The subcommands of `tessera`. Each adds itself to the parser and, when it was
// chosen, runs and returns the exit code.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace tessera::cli {

/// Runs a subcommand after parsing.
using Action = std::function<int()>;

/// Starts the ranks of a program and watches over them.
Action add_run(CLI::App& app);
/// Removes the `--` of `run [OPTIONS] -- PROGRAM`; one that belongs to the
/// program's own arguments stays.
void drop_separator(std::vector<std::string>& words);

/// Says what is installed, what works, and how to mend what does not.
Action add_doctor(CLI::App& app);

/// Looks at checkpoints, checks, compares and converts them.
Action add_ckpt(CLI::App& app);

/// Makes the page that shows a training run.
Action add_report(CLI::App& app);
/// Says what a training run takes, before it is started.
Action add_plan(CLI::App& app);

} // namespace tessera::cli
