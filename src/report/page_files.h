// src/report/page/*, as the build embeds them.
#pragma once

#include <string_view>

namespace tessera::report {

extern const std::string_view kChartJs;
extern const std::string_view kComparisonHtml;
extern const std::string_view kComparisonJs;
extern const std::string_view kControlsJs;
extern const std::string_view kCursorJs;
extern const std::string_view kCurvesJs;
extern const std::string_view kElementJs;
extern const std::string_view kListJs;
extern const std::string_view kNumberJs;
extern const std::string_view kPageCss;
extern const std::string_view kRunHtml;
extern const std::string_view kRunJs;
extern const std::string_view kScaleJs;
extern const std::string_view kSmoothingJs;
extern const std::string_view kSummaryJs;
extern const std::string_view kTimelineJs;
extern const std::string_view kTipJs;

} // namespace tessera::report
