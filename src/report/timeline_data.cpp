#include "report/timeline_data.h"

#include <algorithm>
#include <map>

#include "report/json_value.h"
#include "report/timeline_shares.h"

namespace tessera::report {
namespace {

using nlohmann::json;

// How much the page has room for.
constexpr size_t kRanks = 16;
constexpr size_t kSpans = 3000; // in one timeline

/// Numbers that stand for names that occur often.
class NameTable {
 public:
  size_t number(const std::string& name) {
    const auto [place, is_new] = numbers_.emplace(name, names_.size());
    if (is_new) {
      names_.push_back(name);
    }
    return place->second;
  }
  json take() {
    return std::move(names_);
  }

 private:
  std::map<std::string, size_t> numbers_;
  json names_ = json::array();
};

/// The longest spans that there is room for, sorted by their start.
std::vector<Span> shown_spans(std::vector<Span> spans, size_t room) {
  if (spans.size() > room) {
    std::nth_element(
        spans.begin(),
        spans.begin() + room,
        spans.end(),
        [](const Span& a, const Span& b) {
          return a.end - a.start > b.end - b.start;
        });
    spans.resize(room);
  }
  std::stable_sort(
      spans.begin(), spans.end(), [](const Span& a, const Span& b) {
        return a.start < b.start;
      });
  return spans;
}

json rank_data(const RankTimeline& rank, size_t room, NameTable* names) {
  json spans = json::array();
  for (const Span& span : shown_spans(rank.spans, room)) {
    spans.push_back(
        {span.lane,
         names->number(span.name),
         compact(span.start),
         compact(span.end)});
  }
  json busy = json::array();
  for (const double seconds : busy_seconds(rank)) {
    busy.push_back(compact(seconds));
  }
  return {
      {"rank", rank.rank},
      {"spans", std::move(spans)},
      {"left_out", rank.spans.size() - std::min(rank.spans.size(), room)},
      {"busy", std::move(busy)}};
}

json timeline_data(const Timeline& timeline) {
  const size_t count = std::min(timeline.ranks.size(), kRanks);
  NameTable names;
  json ranks = json::array();
  for (size_t i = 0; i < count; ++i) {
    ranks.push_back(rank_data(timeline.ranks[i], kSpans / count, &names));
  }
  return {
      {"step", timeline.step},
      {"seconds", compact(end_of(timeline))},
      {"num_ranks", timeline.ranks.size()},
      {"ranks", std::move(ranks)},
      {"names", names.take()}};
}

} // namespace

json timelines_data(const Run& run) {
  json timelines = json::array();
  for (const Timeline& timeline : run.timelines) {
    timelines.push_back(timeline_data(timeline));
  }
  return timelines;
}

} // namespace tessera::report
