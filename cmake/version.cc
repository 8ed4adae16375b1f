// The shared library is made of the folders' static libraries; this gives it a translation unit of
// its own.
#include "kvferry/version.h"

namespace kvferry {

const char* version() {
  return KVFERRY_VERSION;
}

}  // namespace kvferry
