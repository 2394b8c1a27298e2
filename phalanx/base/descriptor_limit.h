// The soft limit on this process's files and connections (RLIMIT_NOFILE). It is often 1,024, too little for a store or
// a group of thousands of ranks, and a process may raise it to the hard limit itself.
//
//   if (!fd && errno == EMFILE && raise_descriptor_limit()) try_again();
#pragma once

namespace phalanx {

/// Raises the soft limit to the hard one. True if there are more descriptors than before.
bool raise_descriptor_limit();

}  // namespace phalanx
