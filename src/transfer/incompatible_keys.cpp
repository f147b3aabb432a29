#include "transfer/incompatible_keys.h"

#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include "state/nearest.h"

namespace tessera::transfer {

void refuse_incompatible(
    std::string_view call,
    const IncompatibleKeys& keys,
    const std::vector<std::string>& expected) {
  if (keys.missing.empty() && keys.unexpected.empty()) {
    return;
  }
  // A name that is wrong is most likely one that is missing.
  const auto suggest = [](const std::string& name,
                          const std::vector<std::string>& likely,
                          const std::vector<std::string>& others) {
    const std::string first = state::did_you_mean(name, likely);
    return first.empty() ? state::did_you_mean(name, others) : first;
  };
  std::string text = "the state dict does not fit the model.";
  for (const std::string& name : keys.missing) {
    text += fmt::format(
        "\n  missing \"{}\".{}", name, suggest(name, keys.unexpected, {}));
  }
  for (const std::string& name : keys.unexpected) {
    text += fmt::format(
        "\n  unexpected \"{}\".{}",
        name,
        suggest(name, keys.missing, expected));
  }
  raise<c10::ValueError>(
      {.call = call}, text + "\nCorrect the names, or load without strict.");
}

} // namespace tessera::transfer
