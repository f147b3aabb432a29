#include <tessera/error.h>
#include <tessera/optim/options.h>

#include <type_traits>

namespace tessera::optim {

std::optional<std::string> Options::objection() const {
  return std::nullopt;
}

void Options::complete_from(Options& defaults) {
  const auto own = fields();
  const auto theirs = defaults.fields();
  TESSERA_INTERNAL_ASSERT(
      own.size() == theirs.size(), "options of two classes were mixed");
  for (size_t i = 0; i < own.size(); ++i) {
    if (own[i].is_set == nullptr || *own[i].is_set) {
      continue;
    }
    std::visit(
        [&](const auto& mine) {
          using Slot = std::decay_t<decltype(mine)>;
          if constexpr (std::is_pointer_v<Slot>) {
            *mine = *std::get<Slot>(theirs[i].slot);
          }
        },
        own[i].slot);
    *own[i].is_set = true;
  }
  for (const auto& [key, value] : defaults.extra()) {
    if (!extra_.contains(key)) {
      extra_.set(key, value);
    }
  }
  is_complete_ = true;
}

namespace detail {

void refuse_differentiable(bool on) {
  if (on) {
    raise<c10::NotImplementedError>(
        {.call = "differentiable"},
        "steps write parameters in place and record no graph. Leave it false, and write the update with operators where a gradient must flow through it.");
  }
}

void refuse_capturable(bool on) {
  if (on) {
    raise<c10::NotImplementedError>(
        {.call = "capturable"},
        "the option is Python's, of Adam and AdamW, and has no effect here. Leave it false; tessera::optim::capture_objection() says which optimizers a CapturedStep captures.");
  }
}

} // namespace detail
} // namespace tessera::optim
