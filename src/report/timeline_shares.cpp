#include "report/timeline_shares.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace tessera::report {
namespace {

double covered(std::vector<std::pair<double, double>> intervals) {
  std::sort(intervals.begin(), intervals.end());
  double sum = 0;
  double reached = 0;
  for (const auto& [start, end] : intervals) {
    sum += std::max(0.0, end - std::max(start, reached));
    reached = std::max(reached, end);
  }
  return sum;
}

} // namespace

std::array<double, kLanes.size()> busy_seconds(const RankTimeline& rank) {
  std::array<std::vector<std::pair<double, double>>, kLanes.size()> intervals;
  for (const Span& span : rank.spans) {
    intervals[span.lane].emplace_back(span.start, span.end);
  }
  std::array<double, kLanes.size()> seconds{};
  for (size_t lane = 0; lane < kLanes.size(); ++lane) {
    seconds[lane] = covered(std::move(intervals[lane]));
  }
  return seconds;
}

double end_of(const Timeline& timeline) {
  double end = 0;
  for (const RankTimeline& rank : timeline.ranks) {
    for (const Span& span : rank.spans) {
      end = std::max(end, span.end);
    }
  }
  return end;
}

} // namespace tessera::report
