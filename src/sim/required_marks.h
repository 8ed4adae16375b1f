// Marks that any run of at least 500 seeds must have reached: proof that the rare branches are
// walked.
#pragma once

namespace kvferry::sim {

inline constexpr const char* kRequiredMarks[] = {
    "a call to the bootstrap server ran out of time",
    "a chunk waited for its producer",
    "a chunk waited for leave to write",
    "a control message was lost",
    "a drained answer brought pages home",
    "a drained answer was withheld because a former life may have written",
    "a drained answer was withheld because a write was unsettled",
    "a foreign rank registered other memory under its old name",
    "a foreign rank will be looked up again",
    "a message of an unknown session was answered on the decode side",
    "a message of an unknown session was answered on the prefill side",
    "a pending room expired",
    "a piece was held up on the wire",
    "a piece was refused because its grant was gone",
    "a prefill rank fell silent",
    "a rank was missing from the instance's snapshot",
    "a registration was sent again",
    "a model had state",
    "a model was compressed",
    "a native rank was elected not to write",
    "a room message came after the room had ended",
    "a room message came without a registration",
    "a room number in quarantine was refused",
    "a server did not say whether it is one of ours",
    "a session ended on the decode side",
    "a session ended on the prefill side",
    "a word about a use that is over was ignored",
    "a write ended unsettled",
    "a write failed half-way",
    "an abort came before the sender existed",
    "an instance was asked for again",
    "an instance was lost by its heartbeat",
    "leave to write ran out",
    "pages of two sizes were brought together",
    "pages of a foreign writer came home unproven, by time",
    "the prefill side had CP ranks",
    "the dp rank of a room was asked for again",
};

}  // namespace kvferry::sim
