#pragma once

/// Marks what the shared library exports; everything else is hidden.
#define TESSERA_API [[gnu::visibility("default")]]
