#pragma once

#include <array>

#include "report/run.h"

namespace tessera::report {

/// Seconds in which a lane was busy, for each of kLanes; spans that overlap
/// count once.
std::array<double, kLanes.size()> busy_seconds(const RankTimeline& rank);

/// When the last span of any rank ends.
double end_of(const Timeline& timeline);

} // namespace tessera::report
