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

/// Starts the ranks of a program and supervises them.
Action add_run(CLI::App& app);
/// Removes the `--` of `run [OPTIONS] -- PROGRAM`; one that belongs to the
/// program's own arguments stays.
void drop_separator(std::vector<std::string>& words);

/// Prints what is installed, what works, and how to fix what does not.
Action add_doctor(CLI::App& app);

/// Inspects, verifies, compares and converts checkpoints.
Action add_ckpt(CLI::App& app);

/// Prints completions for a shell.
Action add_completion(CLI::App& app);
/// Prints or writes manual pages.
Action add_man(CLI::App& app);

/// Makes the page that shows a training run.
Action add_report(CLI::App& app);
/// Prints the memory and traffic of a training run before it is started.
Action add_plan(CLI::App& app);

} // namespace tessera::cli
