#include "settings.h"

#include <charconv>
#include <string_view>

namespace gpt {
namespace {

struct CountFlag {
  const char* name;
  int64_t Settings::*field;
  const char* meaning;
};

constexpr CountFlag kCountFlags[] = {
    {"--steps", &Settings::steps, "steps of training"},
    {"--batch", &Settings::batch, "windows of text a step, over all ranks"},
    {"--length", &Settings::length, "bytes a window"},
    {"--layers", &Settings::layers, "blocks of the GPT"},
    {"--heads", &Settings::heads, "heads of its attention"},
    {"--width", &Settings::width, "width of its layers"},
};

template <typename Number>
Number positive(const std::string& flag, std::string_view text) {
  Number value{};
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value);
  if (result.ec != std::errc() || result.ptr != end || !(value > 0)) {
    throw UsageError(
        flag + " wants a number above 0, not \"" + std::string(text) + "\".");
  }
  return value;
}

void set(Settings& settings, const std::string& flag, const char* value) {
  for (const CountFlag& count : kCountFlags) {
    if (flag == count.name) {
      settings.*count.field = positive<int64_t>(flag, value);
      return;
    }
  }
  if (flag == "--text") {
    settings.text = value;
  } else if (flag == "--tolerance") {
    settings.tolerance = positive<double>(flag, value);
  } else {
    throw UsageError("there is no flag " + flag + ".");
  }
}

void check(const Settings& settings, int num_ranks) {
  if (settings.batch % num_ranks != 0) {
    throw UsageError(
        "a batch of " + std::to_string(settings.batch) +
        " cannot be divided among " + std::to_string(num_ranks) +
        " ranks. Try --batch " + std::to_string(4 * num_ranks) + ".");
  }
  if (settings.width % settings.heads != 0) {
    throw UsageError(
        "--width " + std::to_string(settings.width) +
        " cannot be divided among --heads " + std::to_string(settings.heads) +
        ".");
  }
}

} // namespace

Settings parse_settings(int argc, char** argv, int num_ranks) {
  Settings settings;
  for (int i = 1; i < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--help" || flag == "-h") {
      settings.help = true;
      return settings;
    }
    set(settings, flag, i + 1 < argc ? argv[i + 1] : "");
  }
  check(settings, num_ranks);
  return settings;
}

std::string usage() {
  auto line = [](std::string flag, const std::string& meaning) {
    flag.resize(15, ' ');
    return "  " + flag + meaning + "\n";
  };
  std::string text = "usage: [tessera run -n RANKS] demo [FLAGS]\n";
  const Settings defaults;
  for (const CountFlag& count : kCountFlags) {
    text += line(
        std::string(count.name) + " N",
        std::string(count.meaning) + " (" +
            std::to_string(defaults.*count.field) + ")");
  }
  text += line("--text FOLDER", "where *.h files are read (LibTorch's own)");
  text += line("--tolerance X", "how far losses may be apart (0.001)");
  text +=
      "Returns 1 if the losses of the plain and the sharded run are further "
      "apart,\nrelative to their size, or if they did not fall.\n";
  return text;
}

} // namespace gpt
