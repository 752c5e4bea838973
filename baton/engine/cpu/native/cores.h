// Number of threads that this process may run now, of the cores that the workers of a host share.
//
// Every worker has an entry in a table in shared memory: its number of cores while it computes, else
// 0. The other cores are divided evenly among the workers that compute. The table is read for each
// job of a team, so a core goes back within one job (about a millisecond) after its owner has begun.
// No worker waits for another, and no lock can remain after a death.

#pragma once

namespace baton {

// Returns how many of `threads` a job may use now.
int allowed(int threads);

}  // namespace baton
