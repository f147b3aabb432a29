#include "checkpoint/peers.h"

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/comm/init.h>
#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/byte_stream.h"
#include "base/cores.h"
#include "checkpoint/disk/file_error.h"
#include "comm/group/all_or_none.h"
#include "comm/group/group_impl.h"

namespace tessera::checkpoint {

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
