// Data plane between processes of one host: the stream engine with its payload in shared memory
// (src/data/stream/engine.h). Peers meet at a Unix socket in `directory`; containers that share
// that directory reach each other. Needs no right to look into other processes.
#pragma once

#include <memory>
#include <string>

#include "src/data/stream/stream_plane.h"

namespace kvferry::data {

// "shm/<path of the socket>/<life>". kUnavailable when the socket cannot be made in `directory`.
Result<std::unique_ptr<StreamPlane>> create_shm_plane(const std::string& directory,
                                                      const Settings& settings, Entropy& entropy);

// Whether `peer` is the address of a shm plane whose socket this process can see.
bool shm_plane_in_reach(const PlaneAddress& peer);

}  // namespace kvferry::data
