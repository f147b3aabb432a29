// This host: who it is, how many cores it lends us, how others reach it.
#pragma once

#include <netdb.h>

#include <memory>
#include <string>

namespace tessera::comm {

/// Equal for two processes exactly if they can share memory: same boot, same
/// network and process namespaces, same user. Host names do not do: containers
/// and namespaces on one machine share them.
std::string host_identity();

/// Cores this process may run on.
int available_cores();

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

/// The addresses of `host`. Throws c10::DistNetworkError if it has none.
AddressList resolve(const std::string& host, int port, int socket_type);

/// True for "localhost", 127.0.0.0/8 and ::1.
bool is_loopback(const std::string& host);

/// The numeric address of this host that packets to `host` leave from.
/// TESSERA_SOCKET_ADDR overrides it. Throws if `host` cannot be resolved.
std::string address_towards(const std::string& host, int port);

} // namespace tessera::comm
