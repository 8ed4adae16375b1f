// What of the library is visible from outside: only what carries KVF_API.
#pragma once

#if defined(__GNUC__) || defined(__clang__)
#define KVF_API __attribute__((visibility("default")))
#else
#define KVF_API
#endif
