#include "comm/store/secret.h"

#include <tessera/error.h>

#include <sys/random.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <bit>
#include <cerrno>
#include <cstdlib>
#include <system_error>

namespace tessera::comm {
namespace {

/// Whoever has seen a proof can try out guesses cheaply.
constexpr size_t kLeastCharacters = 16;
constexpr size_t kBlock = 64;

constexpr std::array<uint32_t, 64> kRounds{
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1,
    0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3,
    0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786,
    0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13,
    0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
    0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a,
    0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

using State = std::array<uint32_t, 8>;

void add_block(State& state, std::string_view block) {
  std::array<uint32_t, 64> words{};
  for (size_t i = 0; i < kBlock; ++i) {
    words[i / 4] = words[i / 4] << 8 | static_cast<uint8_t>(block[i]);
  }
  for (size_t i = 16; i < 64; ++i) {
    const uint32_t a = words[i - 15];
    const uint32_t b = words[i - 2];
    words[i] = words[i - 16] + words[i - 7] +
        (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) +
        (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (size_t i = 0; i < 64; ++i) {
    const uint32_t one = h + kRounds[i] + words[i] + ((e & f) ^ (~e & g)) +
        (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25));
    const uint32_t two = ((a & b) ^ (a & c) ^ (b & c)) +
        (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22));
    h = g;
    g = f;
    f = e;
    e = d + one;
    d = c;
    c = b;
    b = a;
    a = one + two;
  }
  const State rest{a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < state.size(); ++i) {
    state[i] += rest[i];
  }
}

} // namespace

/// FIPS 180-4.
Digest sha256(std::string_view bytes) {
  std::string padded(bytes);
  padded += '\x80';
  padded.resize((padded.size() + 8 + kBlock - 1) / kBlock * kBlock - 8);
  for (int shift = 56; shift >= 0; shift -= 8) {
    padded += static_cast<char>(uint64_t{bytes.size()} * 8 >> shift);
  }
  State state{
      0x6a09e667,
      0xbb67ae85,
      0x3c6ef372,
      0xa54ff53a,
      0x510e527f,
      0x9b05688c,
      0x1f83d9ab,
      0x5be0cd19};
  for (size_t at = 0; at < padded.size(); at += kBlock) {
    add_block(state, std::string_view(padded).substr(at, kBlock));
  }
  Digest digest;
  for (size_t i = 0; i < digest.size(); ++i) {
    digest[i] = static_cast<uint8_t>(state[i / 4] >> (24 - 8 * (i % 4)));
  }
  return digest;
}

/// RFC 2104.
Digest hmac_sha256(std::string_view key, std::string_view bytes) {
  std::string block(key);
  if (block.size() > kBlock) {
    const Digest short_key = sha256(key);
    block = view_of(short_key);
  }
  block.resize(kBlock);
  const auto with_key = [&](char mask, std::string_view rest) {
    std::string text = block;
    for (char& c : text) {
      c = static_cast<char>(c ^ mask);
    }
    text += rest;
    return sha256(text);
  };
  const Digest inner = with_key(0x36, bytes);
  return with_key(0x5c, view_of(inner));
}

Nonce make_nonce() {
  Nonce nonce;
  ssize_t count = 0;
  do {
    count = getrandom(nonce.data(), nonce.size(), 0);
  } while (count < 0 && errno == EINTR);
  if (count != static_cast<ssize_t>(nonce.size())) {
    throw std::system_error(errno, std::generic_category(), "getrandom");
  }
  return nonce;
}

std::string secret_from_environment() {
  const char* text = std::getenv("TESSERA_STORE_SECRET");
  const std::string secret = text == nullptr ? "" : text;
  if (!secret.empty() && secret.size() < kLeastCharacters) {
    raise<c10::ValueError>(
        {.call = "init"},
        fmt::format(
            "TESSERA_STORE_SECRET has {} characters, and a secret needs {} at least. Make one with `head -c 24 /dev/urandom | base64`, and give it to all processes of the run.",
            secret.size(),
            kLeastCharacters));
  }
  return secret;
}

Digest Proofs::of(std::string_view whose) const {
  std::string text = "tessera store ";
  text += whose;
  text += '\0'; // so that no name is the beginning of another
  text += view_of(client_);
  text += view_of(host_);
  return hmac_sha256(secret_, text);
}

bool is_same(const Digest& one, const Digest& other) {
  uint8_t difference = 0;
  for (size_t i = 0; i < one.size(); ++i) {
    difference = static_cast<uint8_t>(difference | (one[i] ^ other[i]));
  }
  return difference == 0;
}

} // namespace tessera::comm
