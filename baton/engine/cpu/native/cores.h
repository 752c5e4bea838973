// How many threads this process may run now, of the cores that the workers of a host share.
//
// Every worker has a place in a table in shared memory, and says there how many cores are its own
// while it computes; else 0. What nobody claims is shared out evenly among those who compute. It is
// looked up for each job of a team, so a core goes back within one job (a millisecond or so) after its
// owner has begun: nobody waits for anybody, and nothing is held that a death could leave behind.

#pragma once

namespace baton {

// Of `threads` that a job could use.
int allowed(int threads);

}  // namespace baton
