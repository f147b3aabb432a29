// The secret that the processes of a run may share, and how they prove it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace tessera::comm {

using Digest = std::array<uint8_t, 32>;
using Nonce = std::array<uint8_t, 16>;

Digest sha256(std::string_view bytes);
Digest hmac_sha256(std::string_view key, std::string_view bytes);

/// A nonce, never the same twice. Throws std::system_error if the kernel has no
/// random bytes.
Nonce make_nonce();

/// TESSERA_STORE_SECRET, or an empty text if it is not set. Throws
/// c10::ValueError if the secret is too short. No message shows the secret.
std::string secret_from_environment();

/// [Note: the secret]
///
/// With a secret the host of a store and its client prove to each other that
/// they know the secret, and neither sends it:
///
///   client -> host   kHello, nonce C
///   host -> client   nonce H, proof("host", C, H)
///   client -> host   kProof, proof("client", C, H)
///
/// Afterwards the connection is not encrypted: whoever can read the wire reads
/// what goes over it. A host with a secret refuses every client that does not
/// prove the secret, Python's clients included.
class Proofs {
 public:
  Proofs(std::string secret, const Nonce& client, const Nonce& host)
      : secret_(std::move(secret)), client_(client), host_(host) {}

  Digest of_host() const {
    return of("host");
  }
  Digest of_client() const {
    return of("client");
  }

 private:
  Digest of(std::string_view whose) const;

  std::string secret_;
  Nonce client_;
  Nonce host_;
};

/// Takes the same time whatever the bytes are.
bool is_same(const Digest& one, const Digest& other);

template <class Bytes>
std::string_view view_of(const Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

} // namespace tessera::comm
