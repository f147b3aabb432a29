// This host: its identity, and how other hosts reach it.
#pragma once

#include <netdb.h>

#include <chrono>
#include <memory>
#include <string>

namespace tessera::comm {

/// Equal for two processes that are expected to share memory: same boot, same
/// network, process and user namespaces, same user. Host names do not
/// suffice: containers and namespaces on one machine share them.
std::string host_identity();

/// What keeps two processes from sharing memory though they are on one machine
/// and in one network namespace, for example "user namespaces". Empty if
/// nothing keeps them apart, or if they are on different hosts.
std::string what_separates(const std::string& one, const std::string& other);

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

/// The addresses of `host`, which may be in brackets. An unknown name is
/// resolved again until `deadline`: while pods or nodes are starting, the name
/// may soon be known. Throws c10::DistNetworkError if `host` has no address.
AddressList resolve(
    const std::string& host,
    int port,
    int socket_type,
    std::chrono::steady_clock::time_point deadline = {});

/// "::1" for "[::1]".
std::string without_brackets(const std::string& host);

/// True for "localhost", 127.0.0.0/8 and ::1.
bool is_loopback(const std::string& host);

/// The numeric address of this host that packets to `host` leave from.
/// TESSERA_SOCKET_ADDR overrides it. Throws if `host` cannot be resolved by
/// `deadline`.
std::string address_towards(
    const std::string& host,
    int port,
    std::chrono::steady_clock::time_point deadline = {});

} // namespace tessera::comm
