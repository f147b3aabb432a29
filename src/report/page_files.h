// src/report/page/*, as the build embeds them.
#pragma once

#include <string_view>

namespace tessera::report {

extern const std::string_view kPageHtml;
extern const std::string_view kPageCss;
extern const std::string_view kPageJs;

} // namespace tessera::report
