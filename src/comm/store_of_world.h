// The store through which the ranks of a world meet: hosted here, or found.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/environment.h"
#include "comm/launcher_process.h"
#include "comm/rendezvous.h"
#include "comm/store/port_handout.h"

namespace tessera::comm {

/// A store that this process hosts. Kept until the process ends: other ranks
/// may need the store after this rank has shut down, and a later init() uses it
/// again.
struct HostedStore {
  StoreEndpoint asked_for;
  StoreEndpoint endpoint; // with the port in use
  StorePtr store;
  std::unique_ptr<PortHandout> handout; // where no port was given
};

struct OpenedStore {
  StorePtr store;
  StoreEndpoint endpoint;
};

/// Hosts the store or connects to it, as the environment says; `kept` has the
/// stores that earlier calls host. Throws c10::ValueError if the environment
/// does not say where the ranks meet.
OpenedStore open_store(
    std::vector<HostedStore>& kept,
    const Environment& environment,
    Milliseconds timeout);

} // namespace tessera::comm
