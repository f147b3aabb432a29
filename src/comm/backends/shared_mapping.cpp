#include "comm/backends/shared_mapping.h"

#include <tessera/error.h>

#include <unistd.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <optional>
#include <string_view>
#include <system_error>

namespace tessera::comm {
namespace {

// How an answer begins that is not a process number.
constexpr char kFailed = '!'; // an error of the program or the user
constexpr char kCannot = '~'; // this host does not let memory be shared
/// In place of rank 0's segment. Rank 0's answer says why there is none.
constexpr std::string_view kNoSegment = "none";

/// The error of the first rank whose answer begins with `mark`, if any.
std::optional<std::string> find_problem(
    const std::vector<std::string>& answers,
    char mark,
    const std::vector<int>& names) {
  for (size_t peer = 0; peer < answers.size(); ++peer) {
    if (answers[peer].starts_with(mark)) {
      return fmt::format(
          "rank {} cannot share memory with its peers: {}",
          names[peer],
          answers[peer].substr(1));
    }
  }
  return std::nullopt;
}

} // namespace

SharedMapping map_together(
    const BackendConfig& config,
    const std::string& key,
    const std::function<std::pair<size_t, std::string>()>& announce) {
  SharedMapping shared;
  std::string answer = std::to_string(getpid());
  try {
    if (config.rank == 0) {
      const auto [bytes, words] = announce();
      shared.segment = shm::Segment::create(bytes);
      shared.announcement = words;
      config.store->set(
          key, shared.segment.locator().to_string() + "/" + words);
    } else {
      config.store->wait({key}, config.timeout);
      const std::string text = config.store->get_to_str(key);
      if (text != kNoSegment) {
        const size_t slash = text.find('/');
        shared.segment = shm::Segment::open(
            shm::SegmentLocator::parse(text.substr(0, slash)));
        shared.announcement = text.substr(slash + 1);
      }
    }
  } catch (const std::system_error& caught) { // from the segment
    answer = kCannot + std::string(caught.what());
  } catch (const std::exception& caught) {
    answer = kFailed + std::string(caught.what());
  }
  if (config.rank == 0 && shared.segment.data() == nullptr) {
    config.store->set(key, std::string(kNoSegment)); // peers stop waiting
  }
  shared.answers = exchange(
      *config.store,
      key + "/mapped",
      config.rank,
      config.global_ranks,
      answer,
      config.timeout,
      config.call);
  const ErrorSite site{
      .call = config.call,
      .rank = config.global_ranks[static_cast<size_t>(config.rank)]};
  if (auto text = find_problem(shared.answers, kFailed, config.global_ranks)) {
    raise<c10::DistBackendError>(site, *text);
  }
  if (auto text = find_problem(shared.answers, kCannot, config.global_ranks)) {
    raise<CannotShareMemory>(
        site,
        *text +
            ". The backend \"gloo\" (TESSERA_BACKEND=gloo) needs no shared memory.");
  }
  shared.segment.close_descriptor();
  return shared;
}

} // namespace tessera::comm
