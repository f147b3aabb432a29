#include "comm/rendezvous.h"

#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <sstream>
#include <thread>

#include "comm/diagnostics/call.h"

namespace tessera::comm {
namespace {

constexpr const char* kVerdict = "verdict";
constexpr std::string_view kOk = "ok\n";
/// How long the host of the store lets others read a bad verdict.
constexpr Milliseconds kFarewell{3000};

std::string member_key(int rank) {
  return "member/" + std::to_string(rank);
}

/// Writes the verdict unless there is one already; returns the one that holds.
std::string settle(c10d::Store& store, const std::string& verdict) {
  return store.compareSet(kVerdict, "", verdict);
}

std::string timeout_verdict(
    c10d::Store& store,
    int world_size,
    Milliseconds timeout) {
  std::vector<int> missing;
  for (int rank = 0; rank < world_size; ++rank) {
    if (!store.check({member_key(rank)})) {
      missing.push_back(rank);
    }
  }
  if (missing.empty()) {
    return "the last rank came, but no verdict was reached in time. Start the run again.";
  }
  return fmt::format(
      "{} of {} never joined within {:.1f} s. Look at that process's own output; if it is only slow to start, raise the timeout (TESSERA_TIMEOUT, in seconds).",
      rank_list(missing),
      world_size,
      std::chrono::duration<double>(timeout).count());
}

/// "ok" with the table, or what is wrong with it.
std::string check_members(c10d::Store& store, int world_size) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < world_size; ++rank) {
    keys.push_back(member_key(rank));
  }
  std::string table(kOk);
  const auto records = store.multiGet(keys);
  const Member first =
      Member::decode(std::string(records[0].begin(), records[0].end()));
  for (int rank = 0; rank < world_size; ++rank) {
    const auto& bytes = records[static_cast<size_t>(rank)];
    const std::string record(bytes.begin(), bytes.end());
    const Member member = Member::decode(record);
    if (member.torch_version != first.torch_version) {
      return fmt::format(
          "rank 0 runs LibTorch {}.{}, rank {} runs {}.{}. Use one version everywhere.",
          first.torch_version / 100,
          first.torch_version % 100,
          rank,
          member.torch_version / 100,
          member.torch_version % 100);
    }
    if (member.settings != first.settings) {
      return fmt::format(
          "rank 0 runs with {}, rank {} with {}. Give all ranks the same options and variables.",
          first.settings,
          rank,
          member.settings);
    }
    table += record + "\n";
  }
  return table;
}

} // namespace

std::string Member::encode() const {
  return fmt::format(
      "{} {} {} {} {}",
      host,
      world_size,
      cuda_devices,
      torch_version,
      settings);
}

Member Member::decode(const std::string& text) {
  Member member;
  std::istringstream in(text);
  in >> member.host >> member.world_size >> member.cuda_devices >>
      member.torch_version >> member.settings;
  TESSERA_INTERNAL_ASSERT(!in.fail(), "not a member record: " + text);
  return member;
}

namespace {

/// Leaves this rank's record, and writes the verdict if it is known now.
void check_in(c10d::Store& store, int rank, const Member& self) {
  const std::string size_text = std::to_string(self.world_size);
  const std::string agreed = store.compareSet("world_size", "", size_text);
  if (agreed != size_text) {
    settle(
        store,
        fmt::format(
            "rank {} was started with a world size of {}, another rank with {}. All processes of a run need the same WORLD_SIZE.",
            rank,
            self.world_size,
            agreed));
  } else if (store.add("claims/" + std::to_string(rank), 1) > 1) {
    settle(
        store,
        fmt::format(
            "two processes claim to be rank {}. Give each its own RANK, 0 to {}; a process of an earlier run may also still be using this store.",
            rank,
            self.world_size - 1));
  } else {
    store.set(member_key(rank), self.encode());
    if (store.add("count", 1) == self.world_size) {
      settle(store, check_members(store, self.world_size));
    }
  }
}

struct Outcome {
  std::string verdict;
  bool timed_out = false;
};

Outcome await_verdict(
    c10d::Store& store,
    int world_size,
    Milliseconds timeout) {
  try {
    store.wait({kVerdict}, timeout);
  } catch (const c10::DistStoreError&) {
    return {settle(store, timeout_verdict(store, world_size, timeout)), true};
  }
  return {store.get_to_str(kVerdict)};
}

/// After a bad verdict: the store ends with the process that hosts it, so the
/// host waits until the others have read the verdict.
void say_farewell(c10d::Store& store, bool hosts_store, int world_size) {
  const auto deadline = std::chrono::steady_clock::now() + kFarewell;
  auto readers = store.add("readers", 1);
  while (hosts_store && readers < world_size &&
         std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(Milliseconds(20));
    readers = store.add("readers", 0);
  }
}

} // namespace

std::vector<Member> join(
    c10d::Store& store,
    bool hosts_store,
    int rank,
    const Member& self,
    Milliseconds timeout) {
  const int world_size = self.world_size;
  const ErrorSite site{.call = "init", .rank = rank, .world_size = world_size};
  Outcome outcome;
  try {
    check_in(store, rank, self);
    outcome = await_verdict(store, world_size, timeout);
    if (!outcome.verdict.starts_with(kOk)) {
      say_farewell(store, hosts_store, world_size);
    }
  } catch (const c10::DistNetworkError& error) {
    if (outcome.verdict.empty()) {
      raise<PeerLostError>(
          site, fmt::format("while the ranks were joining: {}", error.what()));
    }
  }
  if (!outcome.verdict.starts_with(kOk)) {
    if (outcome.timed_out) {
      raise<TimeoutError>(site, outcome.verdict);
    }
    raise<c10::DistError>(site, outcome.verdict);
  }
  std::vector<Member> members;
  std::istringstream lines(outcome.verdict.substr(kOk.size()));
  for (std::string line; std::getline(lines, line);) {
    members.push_back(Member::decode(line));
  }
  return members;
}

void refuse(c10d::Store& store, const std::string& reason) {
  settle(store, reason);
}

} // namespace tessera::comm
