// What init() takes from its options and from variables of the environment.
#pragma once

#include <tessera/comm/init.h>

#include <memory>

#include "comm/environment.h"
#include "comm/group/group_impl.h"

namespace tessera::comm {

/// The environment, with the options in place of what they set. Throws
/// c10::ValueError.
Environment settle_environment(const InitOptions& options);

/// The settings of this process, checked before it joins the world. Throws
/// c10::ValueError.
std::shared_ptr<WorldInfo> read_settings(
    const InitOptions& options,
    const Environment& environment);

} // namespace tessera::comm
