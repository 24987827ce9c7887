"""Image files that a table holds in its rows, as the content of files: of Parquet and Arrow."""

from collections.abc import Sequence
from pathlib import Path

from solodg.data.images import ImageFiles, MemoryBudget, digest
from solodg.data.loading import Loading
from solodg.pixels import BadImageError, Pixels


class StoredImages(ImageFiles):
    """Contents of image files in memory, decoded when needed; `places` name them in errors."""

    def __init__(
        self,
        contents: Sequence[bytes],
        places: Sequence[str],
        loading: Loading,
        budget: MemoryBudget,
    ) -> None:
        super().__init__(
            Path(),
            places,
            channels=loading.channels,
            size=loading.image_size,
            budget=budget,
            window=loading.window,
        )
        self._contents, self._loading = list(contents), loading

    def _source(self, index: int) -> Path | bytes:
        return self._contents[index]

    def _read_keys(self) -> list[str]:
        return [digest(content) for content in self._contents]

    def _chosen(self, chosen: Sequence[int]) -> ImageFiles:
        contents, places = [self._contents[i] for i in chosen], [self.paths[i] for i in chosen]
        return StoredImages(contents, places, self._loading, self.budget)

    def _decode(self, index: int) -> Pixels:
        try:
            return super()._decode(index)
        except BadImageError as error:
            reason = str(error).partition(": ")[2]
            raise BadImageError(self.paths[index], reason) from error
