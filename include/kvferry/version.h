// The version of the library that is linked.
#pragma once

#include "kvferry/export.h"

namespace kvferry {

// "major.minor.patch". A static string.
KVF_API const char* version();

}  // namespace kvferry
