// What a client says before its first request.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "comm/store/secret.h"
#include "comm/store/wire.h"

namespace tessera::comm {

/// Without a secret a client says that it is a client of a store. With one it
/// proves that it knows the secret, see [Note: the secret].
class Greeting {
 public:
  using Reply = std::function<void(std::string_view bytes)>;

  /// Takes what has come of the greeting from the beginning of `rest`. Returns
  /// whether the greeting is complete; if not, call again once there are
  /// `needed` bytes. Throws BadRequest if this is no client of ours.
  bool take(
      const std::string& secret,
      std::string_view& rest,
      size_t& needed,
      const Reply& reply);
  bool is_complete() const {
    return is_complete_;
  }

 private:
  bool take_proof(
      const std::string& secret,
      std::string_view& rest,
      size_t& needed,
      const Reply& reply);

  std::optional<Proofs> proofs_; // once the client said hello
  bool is_complete_ = false;
};

/// Throws BadRequest where a client of something else says what it is.
void require_magic(const wire::Request& request);

} // namespace tessera::comm
