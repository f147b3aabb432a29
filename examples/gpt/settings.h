#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace gpt {

/// What the command line can change. Sized for half a minute on two cores.
struct Settings {
  int64_t steps = 150;
  int64_t batch = 16; // windows of text a step, over all ranks together
  int64_t length = 64; // bytes a window
  int64_t layers = 3;
  int64_t heads = 4;
  int64_t width = 160;
  double tolerance = 1e-3; // on the losses, relative
  std::string text = GPT_TEXT_FOLDER; // its *.h are read; set by CMake
  bool help = false;
};

class UsageError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

/// Throws UsageError for what it does not know or what makes no sense on so
/// many ranks.
Settings parse_settings(int argc, char** argv, int num_ranks);

std::string usage();

} // namespace gpt
