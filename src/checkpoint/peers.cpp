#include "checkpoint/peers.h"

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/comm/init.h>
#include <tessera/error.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "base/byte_stream.h"
#include "base/cores.h"
#include "base/xxh3.h"
#include "checkpoint/disk/file_error.h"
#include "comm/group/agreed_all_to_all.h"
#include "comm/group/all_or_none.h"
#include "comm/group/group_impl.h"

namespace tessera::checkpoint {
namespace {

/// A view; the bytes must outlive the tensor.
at::Tensor tensor_of(Bytes& bytes) {
  return bytes.empty()
      ? at::empty({0}, at::kByte)
      : at::from_blob(
            bytes.data(), {static_cast<int64_t>(bytes.size())}, at::kByte);
}

} // namespace

Peers::Peers(const std::optional<Group>& group) : group_(group) {
  if (!group_ && is_initialized()) {
    group_ = world();
  }
}

int Peers::rank() const {
  return group_ ? group_->rank() : 0;
}

int Peers::size() const {
  return group_ ? group_->size() : 1;
}

std::vector<Group> Peers::groups() const {
  return group_ ? std::vector<Group>{*group_} : std::vector<Group>{};
}

int Peers::cores_each(int most) const {
  int64_t on_host = 1;
  if (group_) {
    const auto& world = group_->impl().world();
    const auto& hosts = world.host_of;
    on_host = std::count(
        hosts.begin(), hosts.end(), hosts[static_cast<size_t>(world.rank)]);
  }
  return std::clamp(host_cores() / static_cast<int>(on_host), 1, most);
}

Peers Peers::apart(std::string_view name) const {
  if (size() == 1) {
    return *this;
  }
  return Peers(group_->split(0, group_->rank(), name));
}

std::vector<Bytes> Peers::gather(Bytes bytes, std::string_view label) const {
  if (size() == 1) {
    std::vector<Bytes> result;
    result.push_back(std::move(bytes));
    return result;
  }
  return group_->gather_bytes(bytes, 0, label);
}

DistinctTexts Peers::gather_distinct(
    const std::vector<Bytes>& texts,
    std::string_view label) const {
  const size_t count = texts.size();
  const auto ranks = static_cast<size_t>(size());
  const at::Tensor mine =
      at::empty({static_cast<int64_t>(count), 2}, at::kLong);
  static const Xxh3 xxh3 = best_xxh3();
  for (size_t i = 0; i < count; ++i) {
    auto* row = mine.mutable_data_ptr<int64_t>() + 2 * i;
    row[0] = static_cast<int64_t>(xxh3(texts[i].data(), texts[i].size()));
    row[1] = static_cast<int64_t>(texts[i].size());
  }
  at::Tensor all = mine;
  if (ranks > 1) {
    all = at::empty({size(), static_cast<int64_t>(count), 2}, at::kLong);
    group_->all_gather_into(all, mine, label);
  }
  const auto* next = all.const_data_ptr<int64_t>();
  DistinctTexts result;
  result.by_rank.resize(ranks);
  std::map<std::pair<int64_t, int64_t>, size_t> known;
  std::vector<int64_t> sizes(ranks, 0); // that each rank sends
  Bytes sent;
  for (size_t rank = 0; rank < ranks; ++rank) {
    for (size_t i = 0; i < count; ++i, next += 2) {
      const auto [found, is_new] =
          known.try_emplace({next[0], next[1]}, result.texts.size());
      if (is_new) {
        result.texts.emplace_back(static_cast<size_t>(next[1]));
        sizes[rank] += next[1];
        if (rank == static_cast<size_t>(this->rank())) {
          sent.insert(sent.end(), texts[i].begin(), texts[i].end());
        }
      }
      result.by_rank[rank].push_back(found->second);
    }
  }
  const Bytes received = to_root(std::move(sent), sizes, label);
  if (!is_root()) {
    return {};
  }
  auto from = received.begin();
  for (Bytes& text : result.texts) { // in the order in which they are sent
    std::copy_n(from, text.size(), text.begin());
    from += static_cast<std::ptrdiff_t>(text.size());
  }
  return result;
}

/// Rank 0 gets what the ranks send, one after another; `sizes` are by rank.
Bytes Peers::to_root(
    Bytes sent,
    const std::vector<int64_t>& sizes,
    std::string_view label) const {
  if (size() == 1) {
    return sent;
  }
  const std::vector<int64_t> none(sizes.size(), 0);
  std::vector<int64_t> sends = none;
  sends.front() = static_cast<int64_t>(sent.size());
  Bytes received(
      is_root() ? static_cast<size_t>(
                      std::accumulate(sizes.begin(), sizes.end(), int64_t{0}))
                : 0);
  comm::start_agreed_all_to_all(
      *group_,
      tensor_of(received),
      tensor_of(sent),
      is_root() ? sizes : none,
      sends,
      label)
      .wait();
  return received;
}

Bytes Peers::scatter(
    const std::vector<Bytes>& by_rank,
    size_t own_bytes,
    std::string_view label) const {
  if (size() == 1) {
    return by_rank.front();
  }
  std::vector<int64_t> sends(static_cast<size_t>(size()), 0);
  Bytes sent;
  for (size_t rank = 0; is_root() && rank < sends.size(); ++rank) {
    sends[rank] = static_cast<int64_t>(by_rank[rank].size());
    sent.insert(sent.end(), by_rank[rank].begin(), by_rank[rank].end());
  }
  std::vector<int64_t> receives(sends.size(), 0);
  receives.front() = static_cast<int64_t>(own_bytes);
  Bytes received(own_bytes);
  comm::start_agreed_all_to_all(
      *group_, tensor_of(received), tensor_of(sent), receives, sends, label)
      .wait();
  return received;
}

Bytes Peers::broadcast(Bytes bytes, std::string_view label) const {
  return size() == 1 ? bytes : group_->broadcast_bytes(bytes, 0, label);
}

Outcome Outcome::of(const std::function<Bytes()>& body) {
  Outcome outcome;
  try {
    outcome.result = body();
  } catch (const DisagreementError& error) {
    outcome.kind = Kind::Disagreement;
    outcome.text = error.what_without_backtrace();
  } catch (const c10::DistError&) {
    throw; // a peer is gone
  } catch (const c10::ValueError& error) {
    outcome.kind = Kind::ValueError;
    outcome.text = error.what_without_backtrace();
  } catch (const CheckpointAccessError& error) {
    outcome.kind = Kind::Access;
    outcome.text = error.what_without_backtrace();
  } catch (const CheckpointError& error) {
    outcome.kind = Kind::Error;
    outcome.text = error.what_without_backtrace();
  } catch (const FileError& error) {
    outcome.kind = Kind::Error;
    outcome.text = error.what();
  } catch (const c10::Error& error) {
    outcome.kind = Kind::Other;
    outcome.text = error.what_without_backtrace();
  } catch (const std::exception& error) { // such as out of memory, or an error
                                          // in a user's callback
    outcome.kind = Kind::Other;
    outcome.text = error.what();
  }
  return outcome;
}

Outcome Outcome::from_bytes(const Bytes& bytes) {
  ByteReader wire(bytes);
  Outcome outcome;
  outcome.kind = static_cast<Kind>(wire.number());
  outcome.text = wire.text();
  const std::string result = wire.text();
  outcome.result.assign(result.begin(), result.end());
  return outcome;
}

Bytes Outcome::to_bytes() const {
  ByteWriter wire;
  wire.number(static_cast<uint64_t>(kind));
  wire.text(text);
  wire.text({reinterpret_cast<const char*>(result.data()), result.size()});
  return wire.take();
}

void Outcome::raise() const {
  switch (kind) {
    case Kind::Ok:
      return;
    case Kind::Disagreement:
      tessera::raise<DisagreementError>({}, text);
    case Kind::ValueError:
      tessera::raise<c10::ValueError>({}, text);
    case Kind::Other:
      tessera::raise({}, text);
    case Kind::Access:
      tessera::raise<CheckpointAccessError>({}, text);
    case Kind::Error:
      tessera::raise<CheckpointError>({}, text);
  }
}

void settle(const Peers& peers, const std::function<void()>& body) {
  Outcome mine = Outcome::of([&] {
    body();
    return Bytes();
  });
  if (peers.size() == 1) {
    mine.raise();
    return;
  }
  std::optional<std::string> failure;
  if (mine.kind != Outcome::Kind::Ok) {
    const Bytes bytes = mine.to_bytes();
    failure.emplace(bytes.begin(), bytes.end());
  }
  Outcome worst;
  for (const auto& [rank, text] : comm::share_failures(
           *peers.group(), failure, "checkpoint: any errors")) {
    const Outcome other = Outcome::from_bytes({text.begin(), text.end()});
    if (other.kind > worst.kind) {
      worst = other;
      worst.text = fmt::format("rank {}: {}", rank, other.text);
    }
  }
  if (worst.kind != Outcome::Kind::Ok && mine.kind == worst.kind) {
    mine.raise();
  }
  worst.raise();
}

} // namespace tessera::checkpoint
