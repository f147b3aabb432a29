#include "comm/store/greeting.h"

#include <cstdint>
#include <cstring>

namespace tessera::comm {
namespace {

void require_kind(std::string_view bytes, uint8_t kind) {
  if (!bytes.empty() && static_cast<uint8_t>(bytes.front()) != kind) {
    throw wire::BadRequest("this is not a client of a store");
  }
}

bool take_validation(std::string_view& rest, size_t& needed) {
  require_kind(rest, static_cast<uint8_t>(wire::Query::kValidate));
  const auto request = wire::take_request(rest, needed);
  if (request) {
    require_magic(*request);
  }
  return request.has_value();
}

template <class Array>
std::optional<Array> take_array(
    uint8_t kind,
    std::string_view& rest,
    size_t& needed) {
  require_kind(rest, kind);
  Array array;
  needed = 1 + array.size();
  if (rest.size() < needed) {
    return std::nullopt;
  }
  std::memcpy(array.data(), rest.data() + 1, array.size());
  rest.remove_prefix(needed);
  return array;
}

} // namespace

void require_magic(const wire::Request& request) {
  if (request.query == wire::Query::kValidate &&
      request.number != wire::kMagic) {
    throw wire::BadRequest("this is not a client of a store");
  }
}

bool Greeting::take(
    const std::string& secret,
    std::string_view& rest,
    size_t& needed,
    const Reply& reply) {
  is_complete_ = secret.empty() ? take_validation(rest, needed)
                                : take_proof(secret, rest, needed, reply);
  if (is_complete_) {
    needed = 1;
  }
  return is_complete_;
}

bool Greeting::take_proof(
    const std::string& secret,
    std::string_view& rest,
    size_t& needed,
    const Reply& reply) {
  if (!proofs_) {
    if (const auto nonce = take_array<Nonce>(wire::kHello, rest, needed)) {
      const Nonce mine = make_nonce();
      proofs_.emplace(secret, *nonce, mine);
      const Digest proof = proofs_->of_host();
      reply(std::string(view_of(mine)).append(view_of(proof)));
    }
  }
  if (!proofs_) {
    return false;
  }
  const auto proof = take_array<Digest>(wire::kProof, rest, needed);
  if (proof && !is_same(*proof, proofs_->of_client())) {
    throw wire::BadRequest("the client does not know the secret");
  }
  return proof.has_value();
}

} // namespace tessera::comm
