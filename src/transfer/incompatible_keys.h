// Names that a state dict and a model do not share.
#pragma once

#include <tessera/transfer/model_state.h>

#include <string>
#include <string_view>
#include <vector>

namespace tessera::transfer {

/// Throws a c10::ValueError that names all of `keys`, each with the name that
/// was probably meant. Returns if there are none.
void refuse_incompatible(
    std::string_view call,
    const IncompatibleKeys& keys,
    const std::vector<std::string>& expected);

} // namespace tessera::transfer
