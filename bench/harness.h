// What the benchmarks share: arguments, clocks, memory, and rows for run.py.
#pragma once

#include <tessera/comm/group.h>

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace bench {

/// Words, and `--quick`, which runs everything once and briefly, to see that it
/// works.
class Arguments {
 public:
  /// Ends the program with exit code 2 if a flag is unknown.
  Arguments(int argc, char** argv);

  /// The word at `index`, counted from 0.
  std::string word(size_t index, const std::string& otherwise) const {
    return index < words_.size() ? words_[index] : otherwise;
  }
  bool is_quick() const {
    return is_quick_;
  }
  /// How often to repeat what a full run does `full` times.
  int times(int full) const {
    return is_quick_ ? 1 : full;
  }

 private:
  std::vector<std::string> words_;
  bool is_quick_ = false;
};

/// One number for each repeat, in the order in which they were measured.
using Samples = std::vector<double>;

double median(Samples values);

/// Milliseconds that `body` takes on this rank alone.
double milliseconds(const std::function<void()>& body);

/// The same on the slowest rank; all ranks start together. Collective.
double milliseconds(
    const tessera::Group& world,
    const std::function<void()>& body);

/// The largest value of all ranks. Collective.
double largest(const tessera::Group& world, double value);

/// The peak of this process's memory during `body`, in megabytes beyond what it
/// had before.
double extra_megabytes(const std::function<void()>& body);

/// A row for run.py: a line of JSON. run.py takes the medians over the rounds
/// in which it runs a program.
struct Row {
  std::string name;
  const char* unit;
  Samples ours;
  Samples limit = {}; // may be empty
  std::map<std::string, Samples> peers = {}; // those in the same program
};

void print(const Row& row);

} // namespace bench
